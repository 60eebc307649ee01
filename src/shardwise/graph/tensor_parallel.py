"""A language model under tensor and sequence parallelism, as one of its ranks computes it.

Between its sublayers a rank has its slice of the sequence. A sublayer gathers the sequence,
computes with its columns of the first matrices (its heads, its part of the feed-forward's width)
and its rows of the last one, and leaves its slice of the ranks' sum:

    slice ── norm ── all-gather ── q k v | gate up ── out | down ── reduce-scatter ── + ── slice

Vocabulary is cut by rows: of the embedding, and of the output projection, whose loss needs sums
over the ranks. All collectives are plain functions with gradients, so a trace has them as nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.errors import UserError
from shardwise.graph.nodes import ALL_REDUCE, WAIT
from shardwise.graph.torch_private import gather_rows, scatter_rows


class TensorParallelLM(nn.Module):
    """One rank's part of a preset's language model, whose modules it takes over; gives the sum of
    the cross-entropy, as that does.
    """

    def __init__(self, model: Any, ranks: int, group: str, rank: int = 0) -> None:
        super().__init__()
        self.ranks, self.group, self.rank = ranks, group, rank

        def cut(module: nn.Module, dim: int, unit: int = 1) -> None:
            module.weight = _slice(module.weight, dim, ranks, rank, unit)

        for layer in model.layers:
            attention, feed_forward = layer.attention, layer.feed_forward
            for linear in (attention.q, attention.k, attention.v):
                cut(linear, 0, attention.head_width)
            cut(attention.out, 1)
            for linear in (feed_forward.gate, feed_forward.up):
                cut(linear, 0)
            cut(feed_forward.down, 1)
            layer.attention = OverSequence(attention, ranks, group)
            layer.feed_forward = OverSequence(feed_forward, ranks, group)
        if model.head.weight is model.embedding.weight:
            cut(model.embedding, 0)
            model.head.weight = model.embedding.weight
        else:
            cut(model.embedding, 0)
            cut(model.head, 0)
        self.embedding, self.layers = model.embedding, model.layers
        self.norm, self.head = model.norm, model.head

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = scatter_sequence(self._embed(tokens), self.ranks, self.group)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(gather_sequence(self.norm(x), self.ranks, self.group))
        logits, targets = logits.flatten(0, 1).float(), targets.flatten()
        return cross_entropy(logits, targets - self.rank * logits.shape[-1], self.group)

    def _embed(self, tokens: Tensor) -> Tensor:
        """This rank's rows; zeros for tokens that others have."""
        rows = self.embedding.weight.shape[0]
        at = tokens - self.rank * rows
        found = functional.embedding(at.clamp(0, rows - 1), self.embedding.weight)
        return torch.where(_is_mine(at, rows).unsqueeze(-1), found, 0.0)


class OverSequence(nn.Module):
    """A sublayer that needs the whole sequence, and leaves a part of a sum over the ranks."""

    def __init__(self, inner: nn.Module, ranks: int, group: str) -> None:
        super().__init__()
        self.inner, self.ranks, self.group = inner, ranks, group

    def forward(self, x: Tensor) -> Tensor:
        whole = self.inner(gather_sequence(x, self.ranks, self.group))
        return scatter_sequence(whole, self.ranks, self.group)


def gather_sequence(x: Tensor, ranks: int, group: str) -> Tensor:
    """(batch, sequence / ranks, width) of every rank as (batch, sequence, width)."""
    return gather_rows(x, group).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)


def scatter_sequence(x: Tensor, ranks: int, group: str) -> Tensor:
    """The ranks' sum of (batch, sequence, width): this rank's slice of the sequence."""
    return scatter_rows(x.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1), group)


def cross_entropy(logits: Tensor, targets: Tensor, group: str) -> Tensor:
    """The sum over tokens, from each rank's slice of the vocabulary (tokens, vocabulary / ranks);
    `targets` count from its start.
    """
    rows = logits.shape[-1]
    largest = _all_reduce(logits.detach().amax(-1, keepdim=True), "max", group)
    shifted = logits - largest
    total = _SumOverRanks.apply(shifted.exp().sum(-1), group)
    # Not by an index: its gradient would be a matrix of zeros with a number in each row.
    columns = torch.arange(rows, device=logits.device)
    own = torch.where(columns == targets.unsqueeze(-1), shifted, 0.0).sum(-1)
    aimed = _SumOverRanks.apply(own, group)
    return (total.log() - aimed).sum()


def _is_mine(at: Tensor, rows: int) -> Tensor:
    return (at >= 0) & (at < rows)


class _SumOverRanks(torch.autograd.Function):
    """Every rank goes on with the same sum, so its gradient is each summand's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return _all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def _all_reduce(x: Tensor, what: str, group: str) -> Tensor:
    result: Tensor = WAIT(ALL_REDUCE(x, what, group))
    return result


def _slice(weight: Any, dim: int, ranks: int, rank: int, unit: int) -> nn.Parameter:
    """A rank's slice of a weight along `dim`, in whole `unit`s."""
    size, rest = divmod(weight.shape[dim], ranks * unit)
    if rest:
        what = "heads" if unit > 1 else "columns or rows"
        raise UserError(
            f"--tp {ranks} does not divide the {weight.shape[dim] // unit} {what} of a weight of "
            f"{tuple(weight.shape)}"
        )
    kept = weight.detach().narrow(dim, rank * size * unit, size * unit)
    return nn.Parameter(kept.contiguous())
