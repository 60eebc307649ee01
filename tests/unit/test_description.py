"""Descriptions: traced facts against closed forms, against real runs, and against the Plan."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from shardwise import Plan
from shardwise.description.cluster import Cluster
from shardwise.description.language_model import LM
from shardwise.description.model import (
    KernelFact,
    ModelDescription,
    PassFacts,
    UnitDescription,
    UnitSegment,
)
from shardwise.description.parameters import ParameterSpec
from shardwise.description.preset import SIZES, Size, load_preset, parameter_count
from shardwise.description.tracing.trace import trace_module
from shardwise.description.workload import Workload
from shardwise.errors import UserError
from shardwise.predict.describe import describe, describe_trace, trace_model
from shardwise.predict.program import lay_work, rounded, scaled
from shardwise.predict.simulate import simulate
from shardwise.profiling.footprint import open_profiler, peak_on_cpu, read_events
from tests.unit.presets import describe_preset

SIZE = Size(d_model=64, d_ff=96, layers=3, heads=4, kv_heads=4, vocab=50)
GROUPED = dataclasses.replace(SIZE, kv_heads=2)
TIED = dataclasses.replace(SIZE, tied=True)
BATCH, SEQ = 2, 16
WORK = Workload(sequence=SEQ, micro_batch=BATCH)


def build(size: Size = SIZE, checkpoint: str = "none") -> LM:
    torch.manual_seed(0)
    return LM(size, SEQ, checkpoint)  # type: ignore[arg-type]


def tokens(size: Size = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randint(0, size.vocab, (BATCH, SEQ)) for _ in range(2))  # type: ignore[return-value]


def closed_form(size: Size) -> tuple[float, float]:
    """Forward FLOPs of one block and of the output projection, from the sizes."""
    rows, head = BATCH * SEQ, size.d_model // size.heads
    matrices = 2 * size.d_model**2 + 2 * size.d_model * size.kv_heads * head
    matrices += 3 * size.d_model * size.d_ff
    causal_attention = 2 * 2 * BATCH * SEQ * SEQ * size.d_model / 2
    return 2 * rows * matrices + causal_attention, 2 * rows * size.d_model * size.vocab


@pytest.mark.parametrize("size", [SIZE, GROUPED, TIED])
def test_flops_of_the_reference_model_are_the_closed_form(size: Size) -> None:
    described = describe(build(size), WORK, device="cpu")
    block, head = closed_form(size)
    attention = 2 * 2 * BATCH * SEQ * SEQ * size.d_model / 2
    blocks = [unit for unit in described.units if unit.name.startswith("layers")]
    assert len(blocks) == size.layers
    for unit in blocks:
        assert unit.forward_flops == block
        # Twice the products, and attention's five products to forward's two.
        assert unit.backward_flops == 2 * (block - attention) + 2.5 * attention
    assert described.forward_flops == size.layers * block + head
    assert described.parameter_count == parameter_count(size)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "ddp", "hsdp"])
@pytest.mark.parametrize("size", [SIZE, TIED])
def test_units_are_the_plans_units_one_for_one(name: str, size: Size) -> None:
    mesh = (2, 2) if name == "hsdp" else 4
    plan = Plan.of(name, mesh=mesh, bucket_bytes=30_000).resolve(build(size))
    described = describe(build(size), WORK, plan)
    assert [unit.name for unit in described.units] == [unit.name for unit in plan.require_units()]
    for ours, planned in zip(described.units, plan.require_units(), strict=True):
        assert [dataclasses.astuple(p) for p in ours.parameters] == [
            dataclasses.astuple(p) for p in planned.parameters
        ]
    # However it is cut, it is the same work and the same memory.
    whole = describe(build(size), WORK, Plan.of("ddp", reduce="flat"))
    assert described.forward_flops == whole.forward_flops
    assert described.backward_flops == whole.backward_flops
    assert described.saved_bytes == whole.saved_bytes


def test_segments_follow_the_forward_order_and_the_loss_goes_to_the_head() -> None:
    described = describe(build(), WORK)
    assert [unit.name for unit, _ in described.segments][1:4] == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]
    unit, segment = described.segments[-1]
    assert unit.parameters[-1].name == "head.weight"
    assert {"_log_softmax", "mm"} <= {kernel.op for kernel in segment.forward.kernels}
    assert segment.output_bytes == BATCH * SEQ * SIZE.vocab * 4


def test_a_tied_matrix_makes_a_unit_that_runs_twice() -> None:
    described = describe(build(TIED), WORK)
    root = described.unit("root")
    assert [s.position for s in root.segments] == [0, len(described.segments) - 1]


def saved_in_reality(model: nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes of the distinct storages that autograd keeps, without what was there before."""
    there = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    there |= {t.untyped_storage().data_ptr() for t in inputs}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in there:
            kept[address] = tensor  # held, so that no address is used twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("size", [SIZE, GROUPED, TIED])
@pytest.mark.parametrize("checkpoint", ["none", "nonreentrant", "reentrant"])
def test_saved_bytes_are_what_autograd_keeps_in_reality(size: Size, checkpoint: str) -> None:
    model = build(size, checkpoint)
    described = describe(model, tokens(size), device="cpu")
    assert described.saved_bytes == saved_in_reality(model, *tokens(size))


@pytest.mark.parametrize("checkpoint", ["none", "nonreentrant", "reentrant"])
def test_the_memory_curve_peaks_where_a_real_run_does(checkpoint: str) -> None:
    size = Size(d_model=128, d_ff=512, layers=4, heads=4, kv_heads=4, vocab=1000)
    torch.manual_seed(0)
    model = LM(size, 64, checkpoint)  # type: ignore[arg-type]
    inputs = tuple(torch.randint(0, size.vocab, (4, 64)) for _ in range(2))

    def step() -> None:
        model(*inputs).backward()
        model.zero_grad()

    measured = peak_on_cpu(lambda: step)
    trace = trace_module(model, inputs, device="cpu")
    live = peak = 0
    for event in trace.events:
        if event.storage not in trace.inputs and event.what in ("alloc", "free"):
            live += event.nbytes if event.what == "alloc" else -event.nbytes
            peak = max(peak, live)
    assert peak == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("kind", ["nonreentrant", "reentrant"])
def test_checkpointing_by_request_is_checkpointing_by_the_model(kind: str) -> None:
    asked = describe(build(), WORK, checkpoint=kind)
    own = describe(build(SIZE, kind), WORK)
    for ours, theirs in zip(asked.units, own.units, strict=True):
        for figure in ("saved_bytes", "forward_flops", "backward_flops"):
            assert getattr(ours, figure) == getattr(theirs, figure), (ours.name, figure)
    plain = describe(build(), WORK)
    block, kept = asked.unit("layers.1"), plain.unit("layers.1")
    assert block.segments[0].checkpointed and not kept.segments[0].checkpointed
    assert block.saved_bytes == BATCH * SEQ * SIZE.d_model * 4 < kept.saved_bytes
    assert block.forward_flops == kept.forward_flops
    assert block.backward_flops == kept.backward_flops


def test_the_engines_casts_halve_activations_and_autocast_keeps_a_copy_of_the_weights() -> None:
    plain = describe(build(), WORK)
    cast = describe(build(), WORK, Plan.of("zero3", mesh=2, compute_dtype="bfloat16"))
    auto = describe(build(), WORK, autocast="bfloat16")
    blocks = [d.unit("layers.1") for d in (plain, cast, auto)]
    assert 0.45 < blocks[1].saved_bytes / blocks[0].saved_bytes < 0.6
    assert blocks[1].saved_bytes < blocks[2].saved_bytes < blocks[0].saved_bytes * 1.5
    for unit in blocks[1:]:
        products = [k for k in unit.kernels if k.kind in ("matmul", "attention")]
        assert {k.dtype for k in products} == {"bfloat16"}
    # The parameters stay what they are: casting is the engine's doing.
    assert {p.dtype for p in cast.parameters()} == {"float32"}
    weights = sum(p.numel for p in blocks[2].parameters if len(p.shape) == 2) * 2
    assert blocks[2].saved_bytes > blocks[1].saved_bytes + weights


def test_autocast_saves_what_it_saves_in_reality() -> None:
    """Against torch's own autocast, on a net where the CPU's lists and CUDA's agree."""
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    x = torch.randn(8, 32)

    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x)

    described = describe(net, x, device="cpu", autocast="bfloat16")
    assert described.saved_bytes == saved_in_reality(Auto(), x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 16, 3, stride=2, groups=2)
        self.norm = nn.BatchNorm2d(16)
        self.out = nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.first(image))
        x = functional.relu(self.norm(self.second(x)))
        return self.out(x.mean(dim=(2, 3)))


def test_a_convolutional_net() -> None:
    model, image = ConvNet(), torch.randn(4, 3, 9, 9)
    described = describe(model, image, 1, device="cpu")
    first = 2 * 4 * 9 * 9 * 8 * 3 * 9
    second = 2 * 4 * 4 * 4 * 16 * (8 // 2) * 9
    out = 2 * 4 * 16 * 10
    assert described.forward_flops == first + second + out
    # The first convolution's input needs no gradient.
    assert described.backward_flops == first + 2 * (second + out)
    assert described.saved_bytes == saved_in_reality(model, image)
    assert described.buffer_bytes == sum(b.nbytes for b in model.buffers())


def test_torchs_own_transformer_layer() -> None:
    """Its attention is called from inside torch."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    x = torch.randn(BATCH, SEQ, 64)
    described = describe(layer, x, 1, device="cpu")
    assert described.saved_bytes == saved_in_reality(layer, x)
    before = functional.scaled_dot_product_attention
    on_gpu = describe(layer, x, Plan.of("zero3", units=1, compute_dtype="bfloat16"))
    assert any(k.op == "_scaled_dot_product_flash_attention" for k in _kernels(on_gpu))
    assert functional.scaled_dot_product_attention is before


class Biased(nn.Module):
    """Attention with a learned bias of positions, looked up (heads last) and permuted, as in T5."""

    def __init__(self, dense: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.dense, self.dropout = dense, dropout
        self.bias = nn.Embedding(SEQ * SEQ, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(BATCH, SEQ, 4, 16).transpose(1, 2)
        places = torch.arange(SEQ * SEQ, device=x.device).view(SEQ, SEQ)
        mask = self.bias(places).permute(2, 0, 1)[None]
        mask = mask.contiguous() if self.dense else mask
        return functional.scaled_dot_product_attention(q, q, q, mask, self.dropout)


@pytest.mark.parametrize("dense", [True, False])
def test_a_gpu_fuses_no_attention_whose_mask_is_not_dense(dense: bool) -> None:
    x = torch.randn(BATCH, SEQ, 64, requires_grad=True)
    found = describe(Biased(dense), x, Plan.of("zero3", units=1, compute_dtype="bfloat16"))
    names = {kernel.op for kernel in _kernels(found)}
    assert ("_scaled_dot_product_efficient_attention" in names) is dense
    assert ("bmm" in names) is not dense


@pytest.mark.parametrize("learned", [True, False])
def test_a_cpu_fuses_no_attention_whose_mask_is_learned(learned: bool) -> None:
    model = Biased(dense=True).requires_grad_(learned)
    x = torch.randn(BATCH, SEQ, 64, requires_grad=True)
    found = describe(model, x, 1, device="cpu", trace_on="meta")
    names = {kernel.op for kernel in _kernels(found)}
    assert ("_scaled_dot_product_flash_attention_for_cpu" in names) is not learned
    assert found.saved_bytes == saved_in_reality(model, x)


class Latent(nn.Module):
    """Values are narrower than queries and keys, as in DeepSeek's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.out = nn.Linear(64, 96), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.v))
        found = functional.scaled_dot_product_attention(q, q, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("cluster", "op"), [("cuda", "_scaled_dot_product_efficient_attention"), ("cpu", "bmm")]
)
def test_values_may_be_narrower_than_queries(cluster: str, op: str) -> None:
    x = torch.randn(BATCH, SEQ, 64)
    plan = Plan.of("zero3", units=1, compute_dtype="bfloat16")
    found = describe(Latent(), x, plan, device=cluster)
    assert op in {kernel.op for kernel in _kernels(found)}


def test_dropout_in_attention_that_is_not_fused_keeps_bytes() -> None:
    """And its result, for the product with the values."""
    x = torch.randn(BATCH, SEQ, 64, requires_grad=True)
    plan = Plan.of("zero3", units=1, compute_dtype="bfloat16")
    without, with_it = (describe(Biased(False, p), x, plan).saved_bytes for p in (0.0, 0.1))
    weights = BATCH * 4 * SEQ * SEQ
    assert with_it - without == weights * (4 + 1)


def _kernels(described: ModelDescription) -> list[KernelFact]:
    return [kernel for unit in described.units for kernel in unit.kernels]


def test_a_hugging_face_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    model = transformers.LlamaForCausalLM(config)
    described = describe(model, WORK, device="cpu")
    block, head = closed_form(GROUPED)
    assert described.unit("model.layers.1").forward_flops == block
    assert described.forward_flops == 3 * block + head
    assert described.parameter_count == sum(p.numel() for p in model.parameters())
    ids = torch.randint(0, 50, (BATCH, SEQ))

    class WithLabels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=ids, labels=labels).loss

    assert described.saved_bytes == saved_in_reality(WithLabels(), ids, ids.clone())


@pytest.mark.parametrize("name", SIZES)
def test_presets_of_the_trainers_sizes(name: str) -> None:
    preset = load_preset(name)
    size = SIZES[name]
    for field in ("d_model", "d_ff", "layers", "heads", "kv_heads", "vocab", "tied"):
        assert getattr(preset, field) == getattr(size, field)
    assert preset.parameter_count == parameter_count(size)


@pytest.mark.parametrize("size", ["tiny", "llama1b"])
def test_a_preset_is_the_trainers_model_operator_for_operator(size: str) -> None:
    plan = Plan.of("zero3", mesh=2, compute_dtype="bfloat16")
    with torch.device("meta"):
        model = LM(SIZES[size], 32)
    work = Workload(sequence=32, micro_batch=2)
    assert describe(model, work, plan).units == describe_preset(size, work, plan).units


@pytest.mark.parametrize("name", [n for n in (*SIZES, "xxl", "ffn8") if n != "llama405b"])
def test_every_preset_counts_its_parameters(name: str) -> None:
    preset = load_preset(name)
    assert sum(p.numel() for p in preset.build(8).parameters()) == preset.parameter_count


def test_known_parameter_counts() -> None:
    assert load_preset("llama405b").parameter_count == pytest.approx(405.9e9, rel=1e-3)
    assert load_preset("llama70b").parameter_count == pytest.approx(70.55e9, rel=1e-3)
    assert load_preset("llama8b").parameter_count == pytest.approx(8.03e9, rel=1e-3)
    assert load_preset("xxl").parameter_count == 2 * 16384 * 53248 * 126


def test_seed_000s_stack_has_its_flops_and_its_first_layer_needs_no_input_gradient() -> None:
    described = describe_preset("ffn8", Workload(sequence=4096))
    layer = 3 * 2 * 4096 * 4096 * 14336
    assert described.forward_flops == 8 * layer
    assert described.backward_flops == 2 * 8 * layer - layer * 2 / 3


def test_frozen_parameters_have_no_gradient_work() -> None:
    model = build()
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    model.embedding.weight.requires_grad_(False)
    described = describe(model, WORK)
    assert not any(p.trainable for p in described.unit("layers.0").parameters)
    assert described.unit("layers.0").backward_flops == 0
    assert described.unit("layers.1").backward_flops > described.unit("layers.1").forward_flops


def test_one_trace_serves_many_plans_and_the_model_is_left_alone() -> None:
    model = build()
    before = {name: (p.device, p.grad) for name, p in model.named_parameters()}
    trace = trace_model(model, WORK)
    for plan in (Plan.of("zero3", mesh=2), Plan.of("ddp", mesh=2)):
        resolved = plan.resolve(model)
        assert describe_trace(trace, resolved).units == describe(model, WORK, resolved).units
    assert before == {name: (p.device, p.grad) for name, p in model.named_parameters()}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_loss_of_ones_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    x, y = torch.randn(4, 8), torch.randn(4, 8)

    def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(module(x), y)

    described = describe(model, (x, y), 1, loss=loss)
    assert any(kernel.op == "mse_loss" for kernel in described.units[-1].kernels)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum().item() > 0 else x


def test_what_cannot_be_described_says_why() -> None:
    with pytest.raises(UserError, match=r"Reader cannot be described on the meta device.*item"):
        describe(Reader(), torch.randn(2, 4), trace_on="meta")
    with pytest.raises(UserError, match=r"no embedding.*example inputs"):
        describe(Reader(), WORK)
    with pytest.raises(UserError, match="recomputing is 'full', expected one of"):
        describe(build(), WORK, checkpoint="full")
    with pytest.raises(UserError, match="unknown model 'llama8': did you mean 'llama8b'"):
        load_preset("llama8")
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UserError, match="carries no gradient"):
        describe(frozen, torch.randn(1, 2), 1)


def test_values_check_themselves() -> None:
    with pytest.raises(ValueError, match="kernel kind 'gemm'"):
        KernelFact("gemm", 1, 1, "float32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="matmul kernel has 3 sizes"):
        KernelFact("matmul", 1, 1, "float32", shape=(1, 2))
    with pytest.raises(ValueError, match="peak_bytes 3 is below net_bytes 4"):
        PassFacts(peak_bytes=3, net_bytes=4)
    with pytest.raises(ValueError, match="dtype 'float7'"):
        ParameterSpec("w", (1,), "float7")
    segment = UnitSegment(1, PassFacts(), PassFacts(), 0, 0)
    unit = UnitDescription("a", ("a",), (), (segment,))
    with pytest.raises(ValueError, match=r"positions \[1\], expected each of 0 to 0 once"):
        ModelDescription("m", (unit,))
    with pytest.raises(ValueError, match=r"Workload.micro_batch is 0"):
        Workload(sequence=8, micro_batch=0)
    with pytest.raises(ValueError, match=r"optimizer is 'adamv'.*did you mean 'adam'"):
        Workload(sequence=8, optimizer="adamv")
    with pytest.raises(ValueError, match="largest of them must be micro_batch"):
        Workload(sequence=8, micro_batch=3, sizes=((1, 2),))


def test_uneven_work() -> None:
    work = Workload.alternating(sequence=4096, ratio=2, micro_batches=2)
    assert [[work.size_of(g, i) for i in range(2)] for g in range(2)] == [[1, 2], [2, 1]]
    assert work.tokens_on((2, 2)) == 4 * 3 * 4096
    assert Workload(8, 2, 3).tokens_on((1, 4)) == 4 * 2 * 3 * 8


def test_only_a_module_can_be_described() -> None:
    with pytest.raises(UserError, match=r"needs an nn\.Module, got 'tiny'"):
        describe("tiny", Workload(8))  # type: ignore[arg-type]


needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available()
    or not torch.backends.cpu.get_cpu_capability().startswith("AVX"),
    reason="no oneDNN, or none that lays images out anew",
)


def _most_inside(run: Callable[[], Any], op: str) -> int:
    """The most bytes that a real operator has allocated at once, from where it begins."""
    with open_profiler() as profiled:
        run()
    events = read_events(profiled)
    whole = next(e for e in events if e.get("name") == op)
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    inside = [e["args"] for e in memory if 0 <= e["ts"] - whole["ts"] <= whole["dur"]]
    before = inside[0]["Total Allocated"] - inside[0]["Bytes"]
    return max(each["Total Allocated"] for each in inside) - before


@needs_onednn
@pytest.mark.parametrize(
    ("channels", "filters", "side", "width"),
    [(3, 64, 64, 7), (64, 64, 16, 3), (64, 256, 16, 1), (512, 512, 4, 3)],
    ids=["images", "even", "results", "weights"],
)
def test_a_convolution_on_a_cpu_copies_what_it_reads_and_gives(
    channels: int, filters: int, side: int, width: int
) -> None:
    conv = nn.Conv2d(channels, filters, width, padding=width // 2, bias=False)
    x = torch.randn(16, channels, side, side, requires_grad=channels > 3)
    (segment,) = describe(conv, x, 1, loss=lambda m, x: m(x).sum(), device="cpu").units[0].segments
    y = conv(x)
    took = _most_inside(lambda: conv(x), "aten::mkldnn_convolution")
    assert segment.forward.peak_bytes == pytest.approx(took, rel=0.1)
    gradient = torch.ones_like(y)
    took = _most_inside(lambda: y.backward(gradient), "aten::convolution_backward")
    # The weight's gradient counts by itself.
    assert segment.backward.peak_bytes == pytest.approx(took - conv.weight.nbytes, rel=0.1)
    last = x.detach().to(memory_format=torch.channels_last)
    (plain,) = describe(conv, x, 1, device="cuda").units[0].segments
    assert plain.forward.peak_bytes < y.nbytes + 1024
    (plain,) = describe(conv, last, 1, device="cpu").units[0].segments
    assert plain.forward.peak_bytes < y.nbytes + 2 * conv.weight.nbytes + 1024


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="other blocks of channels"
)
@needs_onednn
@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(64, 64, 3, padding=1, groups=64),
        nn.Conv2d(64, 64, 7, padding=3, groups=64),
        nn.Conv2d(64, 64, 3, padding=1, groups=16),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.Conv2d(64, 128, 1),
    ],
    ids=["narrow depthwise", "wide depthwise", "groups", "dense", "1x1"],
)
def test_of_images_whose_channels_come_last_weights_are_copied(conv: nn.Conv2d) -> None:
    """A weight's gradient is made in blocks of 16 x 16 channels, for every group of its own."""
    x = torch.randn(16, 64, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    (segment,) = describe(conv, x, 1, loss=lambda m, x: m(x).sum(), device="cpu").units[0].segments
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        y = conv(x)
        gradient = torch.ones_like(y)
        assert gradient.is_contiguous(memory_format=torch.channels_last)
        took = _most_inside(lambda: y.backward(gradient), "aten::convolution_backward")
        assert conv.bias is not None
        # A sum's gradient is no image: it is laid out as one. The gradients count by themselves,
        # but the weight's only once it is in the weight's own order.
        took += gradient.nbytes - conv.bias.nbytes
        if conv.weight.is_contiguous(memory_format=torch.channels_last):
            took -= conv.weight.nbytes
        assert segment.backward.peak_bytes == pytest.approx(took, rel=0.05)
    finally:
        torch.set_num_threads(threads)


def test_a_peak_with_gradients_that_stay_and_with_those_that_pass() -> None:
    """Two matrices of 256 KiB and one row: activations are next to nothing."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    work = Workload(1, 1, of="samples")
    row, matrix = torch.randn(1, 256), 4 * 256 * 256
    plan = Plan.of("ddp", mesh=2).resolve(model)
    described = describe(model, row, plan, device="cpu", loss=lambda m, x: m(x).sum())
    (segment,) = described.units[0].segments
    part = segment.backward
    assert part.peak_bytes < 0.1 * matrix
    assert part.keeping_bytes == pytest.approx(2 * matrix, rel=0.05)
    assert part.before_bytes == pytest.approx(matrix, rel=0.05)
    assert part.passing_bytes == pytest.approx(matrix, rel=0.05)
    # Over gloo a gradient of data parallel comes beside the message that it goes to.
    peak = simulate(plan, described, Cluster.load("cpu-gloo"), work).peak(0).total
    parameters, message, moments = 2 * matrix, 2 * matrix, 4 * matrix
    assert peak == pytest.approx(parameters + message + moments + matrix, rel=0.02)
    twice = scaled(described, 2).units[0].segments[0].backward
    assert twice.keeping_bytes - twice.peak_bytes == part.keeping_bytes - part.peak_bytes


@needs_onednn
@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv1d(32, 64, 5, padding=2), (8, 32, 256)),
        (nn.Conv1d(64, 128, 3, dilation=2), (8, 64, 256)),
        (nn.Conv1d(64, 64, 3, padding=1, groups=64), (8, 64, 256)),
        (nn.Conv2d(3, 4, 3), (8, 3, 64, 64)),
        (nn.Conv2d(32, 1, 3, padding=1), (8, 32, 64, 64)),
        (nn.Conv2d(20, 40, 3, padding=1), (8, 20, 32, 32)),
        (nn.Conv2d(64, 128, 1), (8, 64, 32, 32)),
        (nn.Conv2d(3, 8, 3), (1, 3, 32, 32)),
        (nn.Conv2d(64, 64, 7, padding=3, groups=64), (8, 64, 16, 16)),
        (nn.Conv2d(64, 64, 3, stride=2, padding=1), (8, 64, 32, 32)),
        (nn.ConvTranspose2d(64, 64, 2, stride=2), (8, 64, 16, 16)),
        (nn.Conv3d(8, 16, 3, padding=1), (2, 8, 8, 16, 16)),
    ],
    ids=[
        "1d",
        "dilated",
        "depthwise",
        "few",
        "one filter",
        "odd",
        "1x1",
        "one sample",
        "wide",
        "strided",
        "transposed",
        "3d",
    ],
)
def test_what_a_convolution_takes_inside_on_one_core(
    conv: nn.Conv2d, shape: tuple[int, ...]
) -> None:
    """Copies have whole blocks of channels; some convolutions are not oneDNN's."""
    x = torch.randn(shape, requires_grad=True)
    (segment,) = describe(conv, x, 1, loss=lambda m, x: m(x).sum(), device="cpu").units[0].segments
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        y = conv(x)
        took = _most_inside(lambda: conv(x), "aten::convolution")
        assert segment.forward.peak_bytes == pytest.approx(took, rel=0.05)
        gradient = torch.ones_like(y)
        took = _most_inside(lambda: y.backward(gradient), "aten::convolution_backward")
        assert conv.bias is not None
        took -= conv.weight.nbytes + conv.bias.nbytes  # their gradients count by themselves
        assert segment.backward.peak_bytes == pytest.approx(took, rel=0.05)
    finally:
        torch.set_num_threads(threads)


@needs_onednn
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_lstm_on_a_cpu_keeps_what_onednn_keeps(ways: int, batch_first: bool) -> None:
    model = nn.LSTM(96, 128, 2, batch_first=batch_first, bidirectional=ways == 2)
    x = torch.randn(16, 24, 96, requires_grad=True)
    described = describe(model, x, 1, loss=lambda m, x: m(x)[0].sum(), device="cpu")
    assert described.saved_bytes == pytest.approx(saved_in_reality(model, x), rel=0.06)


@needs_onednn
def test_gradients_that_come_inside_a_fused_recurrent_network_are_not_placed() -> None:
    """Its backward is one call: the peak of an LSTM's is as it was measured without them."""
    row = torch.randn(5, 2, 16)
    found = describe(nn.LSTM(16, 16), row, 1, loss=lambda m, x: m(x)[0].sum(), device="cpu")
    passes = [segment.backward for unit in found.units for segment in unit.segments]
    fused = [part for part in passes if any(k.kind == "recurrent" for k in part.kernels)]
    assert fused and all(part.keeping_bytes == part.before_bytes == 0 for part in fused)


def test_a_gated_unit_keeps_what_it_keeps_in_reality() -> None:
    """Its gates are chunks of one tensor, though the operator does not say so."""
    model, x = nn.GRU(64, 64), torch.randn(24, 8, 64)
    described = describe(model, x, 1, loss=lambda m, x: m(x)[0].sum(), device="cpu")
    assert described.saved_bytes == pytest.approx(saved_in_reality(model, x), rel=0.02)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(8, 50)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def test_a_gradient_counts_from_where_it_comes() -> None:
    """A shared parameter's at its first use, in forward order; of a bucket that ends inside of a
    module, with the next one's.
    """
    model, tokens = Tied(), torch.zeros(2, 4, dtype=torch.int64)
    plan = Plan.of("zero3", mesh=2).resolve(model)
    described = describe(model, tokens, plan, device="cpu")
    came = [segment.gradients for _, segment in described.segments]
    assert came[0] == ("embed.weight",) and came[-1] == ("head.bias",)
    work = lay_work(plan, described)
    sizes = {p.name: p.nbytes for unit in plan.require_units() for p in unit.parameters}
    assert sum(work.grads[0].values()) == rounded(sizes["embed.weight"])
    buckets = Plan.of("ddp", mesh=2, bucket_bytes=300).resolve(model)
    work = lay_work(buckets, describe(model, tokens, buckets, device="cpu"))
    assert len(buckets.require_units()) > 3
    for uses, grads in zip(work.uses, work.grads, strict=True):
        assert set(grads) <= set(uses)


def test_a_bias_of_rows_that_lie_apart_is_added_in_place() -> None:
    x = torch.randn(16, 32, 8).transpose(0, 1)
    model = nn.Linear(8, 256)
    (segment,) = describe(model, x, 1, loss=lambda m, x: m(x).exp().sum()).units[0].segments
    assert segment.forward.peak_bytes < 2.1 * 32 * 16 * 256 * 4  # the result, and its exponent


def test_a_process_describes_the_same_at_first_and_later() -> None:
    """The compiler is imported at the first operator, and would keep the model's tensors."""
    code = """
import torch
from torch import nn
from shardwise.predict.describe import describe

def loss(model, x):
    output = model(x)
    return output.exp().sum()

for _ in range(2):
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 4096))
    found = describe(model, torch.zeros(4, 4, dtype=torch.int64), 1, loss=loss, device="cpu")
    print([s.forward.net_bytes for _, s in found.segments])
"""
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(told) == 2 and told[0] == told[1]
