"""Models as strangers write them, for `shardwise bench accuracy --as-user`: none knows of this
project, none is its language model.

Each comes in sizes for a GPU, for two ranks on a CPU, and for trying the benchmark. A command names
them as it names anybody's: `--model shardwise.lab.accuracy.user_models:build_unet_gloo --inputs
inputs_unet_gloo`.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.description.workload import Workload

SCALES = ("h200", "gloo", "quick")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv: nn.Module = nn.Linear(width, 3 * width)
        self.out: nn.Module = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Norms before, biases everywhere; the feed-forward part is the caller's."""

    def __init__(self, width: int, heads: int, feed: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed = Attention(width, heads), feed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


def dense(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Writer(nn.Module):
    """A language model of `Layer`s; its projection is the embedding, if it is tied."""

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        vocab: int,
        context: int,
        feed: Callable[[int], nn.Module] = dense,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Layer(width, heads, feed(width)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Eager routing, two experts for each token: the host waits for the device's choice."""

    def __init__(self, width: int, count: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).float().softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            scaled = expert(flat[row]) * weight[row, place, None].to(flat.dtype)
            mixed.index_add_(0, row, scaled)
        return mixed.view_as(x)


class Adapted(nn.Module):
    """A frozen product and a trained one of low rank beside it."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def build_lora(rank: int = 16, **size: Any) -> nn.Module:
    model = Writer(**size).requires_grad_(False)
    for module in list(model.blocks.modules()):
        if isinstance(module, Attention):
            module.qkv, module.out = Adapted(module.qkv, rank), Adapted(module.out, rank)
    return model


def build_compiled(**size: Any) -> nn.Module:
    model = Writer(**size)
    for block in model.blocks:
        block.compile()
    return model


class Reader(nn.Module):
    """A recurrent language model: long chains of small kernels."""

    def __init__(self, width: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])


class Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(True),
            nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.skip: nn.Module = nn.Identity()
        if channels != out or stride != 1:
            conv = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.skip = nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.skip(x))


def build_resnet(width: int, depths: tuple[int, ...], classes: int) -> nn.Module:
    stem = nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1),
    )  # fmt: skip
    stages, channels = [], width
    for i, depth in enumerate(depths):
        inner = width << i
        blocks = []
        for j in range(depth):
            blocks.append(Bottleneck(channels, inner, 4 * inner, 2 if i and not j else 1))
            channels = 4 * inner
        stages.append(nn.Sequential(*blocks))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(stem, *stages, head)


def _twice(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
        nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        sizes = [width << i for i in range(levels)]
        self.down = nn.ModuleList(map(_twice, [3, *sizes[:-1]], sizes))
        backward = sizes[::-1]
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(a, b, 2, 2) for a, b in itertools.pairwise(backward)
        )
        self.join = nn.ModuleList(_twice(2 * b, b) for b in backward[1:])
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        kept, x = [], image
        for i, down in enumerate(self.down):
            x = down(functional.max_pool2d(x, 2) if i else x)
            kept.append(x)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return self.out(x)


def _of_transformers(model: str, config: str, **values: Any) -> nn.Module:
    library = importlib.import_module("transformers")
    built: nn.Module = getattr(library, model)(getattr(library, config)(**values))
    return built


def build_gpt2(**size: int) -> nn.Module:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return _of_transformers("GPT2LMHeadModel", "GPT2Config", use_cache=False, **ends, **size)


def build_bert(**size: int) -> nn.Module:
    return _of_transformers("BertForMaskedLM", "BertConfig", **size)


def build_t5(**size: int) -> nn.Module:
    begin = {"decoder_start_token_id": 0, "pad_token_id": 0}
    kind = "T5ForConditionalGeneration"
    return _of_transformers(kind, "T5Config", use_cache=False, **begin, **size)


def build_vit(**size: int) -> nn.Module:
    return _of_transformers("ViTForImageClassification", "ViTConfig", num_labels=100, **size)


# Inputs, of so many samples, and losses.


def draw_tokens(samples: int, length: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (samples, length))


def draw_labelled(samples: int, length: int, vocab: int) -> dict[str, Tensor]:
    tokens = draw_tokens(samples, length, vocab)
    return {"input_ids": tokens, "labels": tokens.clone()}


def draw_images(samples: int, side: int) -> Tensor:
    return torch.randn(samples, 3, side, side)


def draw_pixels(samples: int, side: int) -> dict[str, Tensor]:
    labels = torch.randint(0, 100, (samples,))
    return {"pixel_values": draw_images(samples, side), "labels": labels}


def next_token(output: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(output[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def first_class(output: Tensor) -> Tensor:
    return functional.cross_entropy(output.float(), torch.zeros_like(output[:, 0]).long())


def mask(output: Tensor, image: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), image.float().mean(1, keepdim=True))


@dataclass(frozen=True)
class UserModel:
    """How a model is built and fed; of each scale the sizes of it, of its inputs, and samples."""

    name: str
    about: str
    build: Callable[..., nn.Module]
    draw: Callable[..., Any]
    loss: Callable[..., Tensor] | None  # None: the model's output has it
    sizes: dict[str, tuple[dict[str, Any], dict[str, int], int]]

    @property
    def loss_takes_inputs(self) -> bool:
        return self.loss is not None and len(inspect.signature(self.loss).parameters) == 2

    def inputs(self, scale: str, samples: int) -> Any:
        """A batch, drawn at random."""
        return self.draw(samples, **self.sizes[scale][1])

    def work(self, scale: str) -> Workload | None:
        """What `--tokens` and `--sequence` say of a language model of transformers, which needs no
        example inputs; None for the others.
        """
        _, shape, samples = self.sizes[scale]
        return Workload(shape["length"], samples) if self.draw is draw_labelled else None

    def text(self, what: str, scale: str) -> str:
        return f"{what}_{self.name.replace('-', '_')}_{scale}"

    def build_text(self, scale: str) -> str:
        """As `--model` takes it."""
        return f"{__name__}:{self.text('build', scale)}"

    def inputs_text(self, scale: str) -> str:
        """As `--inputs` takes it."""
        return self.text("inputs", scale)


def _writer(
    h200: tuple[int, ...], gloo: tuple[int, ...], quick: tuple[int, ...] = (32, 2, 2, 64, 16, 4)
) -> dict[str, Any]:
    """Sizes of a `Writer`: width, layers, heads, vocabulary, tokens of a sample, samples."""
    names = ("width", "layers", "heads", "vocab", "context")
    made = {}
    for scale, (*of_model, samples) in zip(SCALES, (h200, gloo, quick), strict=True):
        size = dict(zip(names, of_model, strict=True))
        made[scale] = (size, {"length": size["context"], "vocab": size["vocab"]}, samples)
    return made


def _of_tokens(vocab: int, length: int, samples: int, **size: int) -> Any:
    return {"vocab_size": vocab, **size}, {"length": length, "vocab": vocab}, samples


def _of_images(side: int, samples: int, **size: Any) -> Any:
    return size, {"side": side}, samples


def _vit(side: int, samples: int, width: int, layers: int, heads: int, patch: int) -> Any:
    return _of_images(
        side, samples, image_size=side, patch_size=patch, hidden_size=width,
        num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
    )  # fmt: skip


def _bert(vocab: int, length: int, samples: int, width: int, layers: int, heads: int) -> Any:
    return _of_tokens(
        vocab, length, samples, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, intermediate_size=4 * width,
    )  # fmt: skip


MODELS = (
    UserModel("gpt2", "GPT-2 medium of transformers: tied, biases, dropout", build_gpt2,
              draw_labelled, None, {
        "h200": _of_tokens(50257, 1024, 8, n_embd=1024, n_layer=24, n_head=16),
        "gloo": _of_tokens(512, 64, 4, n_embd=192, n_layer=6, n_head=4),
        "quick": _of_tokens(64, 16, 2, n_embd=32, n_layer=2, n_head=2),
    }),
    UserModel("bert", "BERT of transformers: an encoder", build_bert, draw_labelled, None, {
        "h200": _bert(30522, 512, 16, 768, 12, 12),
        "gloo": _bert(512, 64, 4, 192, 6, 4),
        "quick": _bert(64, 16, 2, 32, 2, 2),
    }),
    UserModel("t5", "T5 of transformers: encoder and decoder", build_t5, draw_labelled, None, {
        "h200": _of_tokens(32128, 512, 8, d_model=768, d_kv=64, d_ff=3072, num_layers=12,
                           num_heads=12),
        "gloo": _of_tokens(512, 48, 4, d_model=128, d_kv=32, d_ff=512, num_layers=3, num_heads=4),
        "quick": _of_tokens(64, 8, 2, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2),
    }),
    UserModel("vit", "ViT of transformers: images", build_vit, draw_pixels, None, {
        "h200": _vit(224, 64, 1024, 24, 16, 16),
        "gloo": _vit(64, 4, 192, 6, 4, 8),
        "quick": _vit(16, 2, 32, 2, 2, 8),
    }),
    UserModel("resnet", "ResNet-50: convolutions, batch norms", build_resnet, draw_images,
              first_class, {
        "h200": _of_images(224, 64, width=64, depths=(3, 4, 6, 3), classes=1000),
        "gloo": _of_images(64, 8, width=16, depths=(2, 2, 2, 2), classes=100),
        "quick": _of_images(32, 4, width=8, depths=(1, 1), classes=10),
    }),
    UserModel("experts", "Mixtral-like: 8 experts, 2 of them for a token, eager routing",
              lambda **size: Writer(**size, feed=Experts, tied=False), draw_tokens, next_token,
              _writer((1024, 8, 16, 32000, 1024, 8), (128, 3, 4, 512, 64, 4))),
    UserModel("unet", "U-Net: images to images", UNet, draw_images, mask, {
        "h200": _of_images(256, 16, width=64, levels=5),
        "gloo": _of_images(32, 4, width=16, levels=3),
        "quick": _of_images(16, 2, width=8, levels=2),
    }),
    UserModel("lstm", "LSTM of 2 layers: a chain of small kernels", Reader, draw_tokens,
              next_token, {
        "h200": ({"width": 1024, "layers": 2, "vocab": 32000}, {"length": 256, "vocab": 32000}, 64),
        "gloo": ({"width": 192, "layers": 2, "vocab": 512}, {"length": 32, "vocab": 512}, 8),
        "quick": ({"width": 16, "layers": 2, "vocab": 64}, {"length": 8, "vocab": 64}, 2),
    }),
    UserModel("tied", "a wide and shallow language model, tied", Writer, draw_tokens, next_token,
              _writer((2560, 6, 20, 50304, 1024, 8), (256, 3, 4, 1024, 64, 4))),
    UserModel("narrow", "a deep and narrow one, few tokens: the host is slower than the GPU",
              Writer, draw_tokens, next_token,
              _writer((384, 32, 6, 8192, 128, 4), (64, 12, 2, 256, 32, 2))),
    UserModel("lora", "a frozen model with adapters of rank 16", build_lora, draw_tokens,
              next_token, _writer((2048, 12, 16, 32000, 1024, 8), (256, 4, 4, 512, 64, 4))),
    UserModel("long", "one long sequence", Writer, draw_tokens, next_token,
              _writer((1024, 8, 16, 32000, 16384, 1), (128, 3, 4, 512, 512, 1))),
    UserModel("compiled", "blocks under torch.compile", build_compiled, draw_tokens, next_token,
              _writer((1536, 8, 12, 32000, 1024, 8), (192, 3, 4, 512, 64, 4))),
)  # fmt: skip
BY_NAME = {model.name: model for model in MODELS}


def __getattr__(name: str) -> Callable[..., Any]:
    """`build_NAME_SCALE` and `inputs_NAME_SCALE`: functions as users have them in their files."""
    for model in MODELS:
        for scale in SCALES:
            if name == model.text("build", scale):
                return partial(model.build, **model.sizes[scale][0])
            if name == model.text("inputs", scale):
                return _inputs(model, scale)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _inputs(model: UserModel, scale: str) -> Callable[[int], Any]:
    def inputs(samples: int = model.sizes[scale][2]) -> Any:
        return model.inputs(scale, samples)

    return inputs
