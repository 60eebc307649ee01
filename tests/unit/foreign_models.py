"""Models as strangers write them: none knows of this project (`test_any_model.py`)."""

import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class ConvNet(nn.Module):
    """Its last norm needs two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            for _ in range(2)
        )
        self.head, self.norm = nn.Linear(8, 10), nn.BatchNorm1d(10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for stage in self.stages:
            x = x + stage(x)
        return self.norm(self.head(x.mean((2, 3))))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> dict[str, Tensor]:
        a = functional.relu(self.down(x))
        b = functional.relu(self.deep(a))
        if time is not None:
            b = b * time[:, None, None, None]
        return {"mask": self.out(torch.cat([a, self.up(b)], 1))}


class Tagger(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.lstm = nn.LSTM(16, 32, 2, batch_first=batch_first, bidirectional=True)
        self.out = nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(x))[0])


class Patches(nn.Module):
    """A small ViT; positions are made on no device in particular."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 32, 8, 8)
        self.position = nn.Embedding(16, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.cut(image).flatten(2).transpose(1, 2)
        x = x + self.position(torch.arange(x.shape[1]))
        return self.head(self.encoder(x).mean(1))


class Experts(nn.Module):
    """Eager routing: each expert gets the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gate = nn.Embedding(100, 16), nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)
        )
        self.out = nn.Linear(16, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row):
                scaled = expert(flat[row]) * weight[row, place, None]
                mixed.index_add_(0, row, scaled.to(mixed.dtype))
        return self.out(mixed.view_as(x))


class Residual(nn.Module):
    """Blocks with something to recompute; reads a value, or not."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64)
            )
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.reads and x.mean() > 1e6:
            return x
        for block in self.blocks:
            x = x + block(x)
        return x


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(x) if x.mean() > 1e6 else self.small(x)


class WithNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * float(np.asarray(y.detach().float()).std())


class FlexAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        length = x.shape[1]
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device=x.device
        )
        return flex_attention(q, k, v, block_mask=mask)


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.tanh(self.linear(row)))(x)


class Neighbours(nn.Module):
    """A graph as a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("graph", torch.eye(6).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.graph, self.linear(x))


@dataclass
class Answer:
    scores: list[Tensor]


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Answer:
        return Answer([self.linear(x)])


class Spectrum(nn.Module):
    """A transform that no device has in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.linear(x)).abs()


class TwoHeads(nn.Module):
    """Only one of them is used."""

    def __init__(self, both: bool = True) -> None:
        super().__init__()
        self.used = nn.Linear(64, 64, bias=False)
        if both:
            self.unused = nn.Linear(64, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def build_unet() -> nn.Module:
    return UNet()


made = UNet()


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 16, 16)


def mask_loss(output: dict[str, Tensor], image: Tensor) -> Tensor:
    return functional.mse_loss(output["mask"], image.mean(1, keepdim=True))


def build_reading_values() -> nn.Module:
    """Built on the meta device it has no values."""
    return Experts()


def of_anything(output: Tensor | Answer) -> Tensor:
    found = output.scores[0] if isinstance(output, Answer) else output
    return found.abs().mean()


def fails() -> nn.Module:
    raise ValueError("no such width")


def ends() -> nn.Module:
    sys.exit(3)


def gives_a_number() -> int:
    return 3
