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


def cut_for_tensor_parallel(model: nn.Module, ranks: int, group: str) -> nn.Module:
    """Rank 0's part of a preset's language model. It takes over the model's modules."""
    return TensorParallelLM(model, ranks, group)


class TensorParallelLM(nn.Module):
    """The language model of a preset, cut; gives the sum of the cross-entropy, as that does."""

    def __init__(self, model: Any, ranks: int, group: str) -> None:
        super().__init__()
        self.ranks, self.group = ranks, group
        for layer in model.layers:
            attention, feed_forward = layer.attention, layer.feed_forward
            for linear in (attention.q, attention.k, attention.v):
                _cut(linear, 0, ranks, attention.head_width)
            _cut(attention.out, 1, ranks)
            for linear in (feed_forward.gate, feed_forward.up):
                _cut(linear, 0, ranks)
            _cut(feed_forward.down, 1, ranks)
            layer.attention = OverSequence(attention, ranks, group)
            layer.feed_forward = OverSequence(feed_forward, ranks, group)
        if model.head.weight is model.embedding.weight:
            _cut(model.embedding, 0, ranks)
            model.head.weight = model.embedding.weight
        else:
            _cut(model.embedding, 0, ranks)
            _cut(model.head, 0, ranks)
        self.embedding, self.layers = model.embedding, model.layers
        self.norm, self.head = model.norm, model.head

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = scatter_sequence(self._embed(tokens), self.ranks, self.group)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(gather_sequence(self.norm(x), self.ranks, self.group))
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), self.group)

    def _embed(self, tokens: Tensor) -> Tensor:
        """This rank's rows; zeros for tokens that others have."""
        rows = self.embedding.weight.shape[0]
        mine = (tokens < rows).unsqueeze(-1)
        found = functional.embedding(tokens.clamp(max=rows - 1), self.embedding.weight)
        return torch.where(mine, found, 0.0)


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
    """The sum over tokens, from rank 0's slice of the vocabulary: (tokens, vocabulary / ranks)."""
    largest = _all_reduce(logits.detach().amax(-1, keepdim=True), "max", group)
    shifted = logits - largest
    total = _SumOverRanks.apply(shifted.exp().sum(-1), group)
    rows = logits.shape[-1]
    at = targets.clamp(max=rows - 1).unsqueeze(-1)
    mine = torch.where(targets < rows, shifted.gather(-1, at).squeeze(-1), 0.0)
    return (total.log() - _SumOverRanks.apply(mine, group)).sum()


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


def _cut(module: nn.Module, dim: int, ranks: int, unit: int = 1) -> None:
    """Keep rank 0's slice of the weight along `dim`, in whole `unit`s."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    if weight.shape[dim] % (ranks * unit):
        raise UserError(
            f"--tp {ranks} does not divide {weight.shape[dim] // unit} "
            f"({'heads' if unit > 1 else 'columns or rows'} of a weight of {tuple(weight.shape)})"
        )
    kept = weight.detach().narrow(dim, 0, weight.shape[dim] // ranks).contiguous()
    module.weight = nn.Parameter(kept)
