"""Kernels that move memory, products whose rows are not aligned, attention by length: their kinds,
their costs, what calibration says of them.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwise.calibration.calibrate import assemble, fit_attention
from shardwise.calibration.images import TimedCase, kernels_of
from shardwise.calibration.measure import (
    QUICK,
    Effort,
    Findings,
    HostFindings,
    Sampled,
    TimedAttention,
    measure_device,
)
from shardwise.calibration.traffic import cases
from shardwise.description.cluster import Cluster, Device, MatmulPoint, MatmulRate, Traffic
from shardwise.description.cluster_toml import parse_cluster, write_cluster
from shardwise.description.model import KernelFact
from shardwise.predict.cost import Costs
from shardwise.predict.describe import describe
from tests.unit.test_images import kernels, pictures

HOST = HostFindings(Sampled(2e-5, 0), Sampled(3e-4, 0), Sampled(4e-5, 0))
RATE = MatmulRate("float32", 1e9, 1.0)
PLAIN = Device("d", 1e9, 1e9, 1.0, 0.0, (RATE,))


def costs_of(device: Device) -> Costs:
    return Costs(dataclasses.replace(Cluster.load("h200x8"), device=device))


def of_one(run, *tensors) -> KernelFact:
    (kernel,) = kernels_of(run, tensors)
    return kernel


def test_what_lies_alike_moves_as_a_copy_does_and_what_does_not_is_another_kind() -> None:
    x, row = torch.randn(4, 6), torch.randn(6)
    assert of_one(torch.add, x, x).kind == "elementwise"
    assert of_one(torch.add, x.t(), x.t()).kind == "elementwise"  # dense in its own order
    assert of_one(lambda a: a * 2.0, x).kind == "elementwise"
    assert of_one(torch.add, x, row).kind == "strided"
    assert of_one(lambda a: a.t().contiguous(), x).kind == "strided"
    assert of_one(lambda a: a[:, :3].contiguous(), x).kind == "strided"
    assert of_one(lambda a: a.bfloat16(), x).kind == "cast"
    assert of_one(lambda a: a.t().bfloat16(), x).kind == "cast"
    assert of_one(lambda a: torch.cat([a, a]), x).kind == "other"
    assert of_one(lambda a: torch.stack([a.t(), a.t()]), x).kind == "strided"
    assert of_one(lambda a: a.sum(0), x).kind == "reduction"


def test_only_rows_that_no_block_of_threads_holds_are_read_again_by_a_softmax() -> None:
    short, long = (torch.randn(2, n) for n in (4096, 4097))
    for softmax in (functional.softmax, functional.log_softmax):
        assert of_one(lambda x, f=softmax: f(x, -1), short).kind == "other"
        assert of_one(lambda x, f=softmax: f(x, -1), long).kind == "softmax"
    assert of_one(lambda x: functional.softmax(x.t(), 0), long).kind == "softmax"
    backward = torch.ops.aten._log_softmax_backward_data
    assert of_one(lambda x: backward(x, x, 1, torch.float32), long).kind == "softmax"


def test_losses_pick_from_scores_that_they_do_not_read() -> None:
    scores, labels = torch.randn(8, 100), torch.zeros(8, device="meta").long()
    one = torch.ones((), device="meta")
    forward, back = torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss_backward
    picked = of_one(lambda x: forward(x, labels, None, 1, -100), scores)
    assert picked.bytes < 200
    backward = of_one(lambda x: back(one, x, labels, None, 1, -100, one), scores)
    assert scores.nbytes <= backward.bytes < scores.nbytes + 200  # zeros are written


def test_a_table_gets_its_gradient_by_a_kernel_of_its_own_kind() -> None:
    model = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 4))
    described = describe(model, torch.zeros(3, 5).long(), device="cuda")
    (gradient,) = kernels(described, "embedding_dense_backward")
    moved = 15 * 16 * 4 + 15 * 8 + 1000 * 16 * 4  # rows, their places, the table
    assert (gradient.kind, gradient.bytes) == ("lookup_gradient", moved)


def test_norms_in_training_are_kinds_of_their_own() -> None:
    model, image = pictures()
    described = describe(model, image, device="cuda")
    for norm in ("batch_norm", "group_norm"):
        for op in (f"native_{norm}", f"native_{norm}_backward"):
            assert [k.kind for k in kernels(described, op)] == [norm]
    fixed = describe(model.eval(), image, device="cuda")
    assert {k.kind for k in kernels(fixed, "native_batch_norm")} == {"other"}
    for norm, kind in ((nn.LayerNorm(8), "layer_norm"), (nn.RMSNorm(8), "rms_norm")):
        kinds = {
            kernel.kind
            for _, segment in describe(norm, torch.randn(2, 8), device="cuda").segments
            for part in (segment.forward, segment.backward)
            for kernel in part.kernels
            if "norm" in kernel.op
        }
        assert kinds == {kind}


@pytest.mark.parametrize(
    ("outputs", "dtype", "alignment"),
    [(64, torch.bfloat16, 16), (68, torch.bfloat16, 8), (66, torch.bfloat16, 4),
     (65, torch.bfloat16, 2), (65, torch.float32, 4), (66, torch.float32, 8)],
)  # fmt: skip
def test_rows_of_a_product_lie_apart_by_what_they_hold(outputs, dtype, alignment) -> None:
    layer = nn.Linear(32, outputs, bias=False, dtype=dtype)
    x = torch.randn(8, 32, dtype=dtype, requires_grad=True)
    found = [
        k
        for _, s in describe(layer, x, device="cuda").segments
        for part in (s.forward, s.backward)
        for k in part.kernels
        if k.kind == "matmul"
    ]
    assert len(found) == 3 and {k.alignment for k in found} == {alignment}
    # A factor of one column has no rows that lie apart.
    assert (
        of_one(torch.mm, torch.randn(8, 1).bfloat16(), torch.randn(1, 64).bfloat16()).alignment
        == 16
    )


def test_compiled_parts_are_fused_and_others_are_not() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())

    model = nn.Sequential(nn.Embedding(10, 16), block(), block())
    model[1].compile()
    described = describe(model, torch.zeros(2, 8).long(), device="cuda")
    kinds = {unit.name: set() for unit in described.units}
    for name, segment in ((u.name, s) for u in described.units for s in u.segments):
        for part in (segment.forward, segment.backward):
            kinds[name] |= {kernel.kind for kernel in part.kernels}
    assert {"layer_norm", "reduction"} <= kinds["2"]
    assert kinds["1"] == {"matmul", "elementwise"}
    assert "lookup_gradient" in {kind for found in kinds.values() for kind in found}


def test_a_file_says_how_well_each_kind_moves_memory() -> None:
    assert Cluster.load("cpu-gloo").device.traffic == ()
    norm = KernelFact("batch_norm", 0.0, 8e3, "float32")
    total = KernelFact("reduction", 0.0, 8e3, "float32")
    odd = KernelFact("matmul", 4e6, 8e3, "float32", (64, 64, 64), alignment=4)
    short = KernelFact("attention", 4e6, 8e3, "float32", (1, 1, 64, 64, 32))
    told = dataclasses.replace(
        PLAIN,
        matmul=(dataclasses.replace(RATE, aligned_4_fraction=0.25),),
        attention_half=2048.0,
        traffic=(Traffic("batch_norm", 4.0), Traffic("reduction", 2.0, 1e-4)),
    )
    before, after = costs_of(PLAIN), costs_of(told)
    facts = (norm, total, odd, short)
    assert [before.kernel(k) for k in facts] == pytest.approx([8e-6, 8e-6, 4e-3, 8e-3])
    assert [after.kernel(k) for k in facts] == pytest.approx([32e-6, 1.16e-4, 16e-3, 16e-3])
    causal = dataclasses.replace(short, causal=True)  # sees half as much
    assert after.kernel(causal) == pytest.approx(24e-3)
    in_turn = KernelFact("recurrent", 4e6, 0.0, "float32", (64, 64, 64), batch=10)
    slow = costs_of(dataclasses.replace(PLAIN, kernel_s=1e-3))
    assert slow.kernel(in_turn) == 10e-3
    again = parse_cluster(write_cluster(after.cluster), "mine.toml")
    assert again.device == told
    with pytest.raises(ValueError, match="traffic of 'batchnorm', expected one of matmul, "):
        Traffic("batchnorm", 1.0)


def test_calibration_finds_the_traffic_that_times_were_made_of() -> None:
    points = [MatmulPoint(1024, 1024, 1024, 3e14), MatmulPoint(4096, 4096, 4096, 6e14)]
    found = Findings({"bfloat16": points}, copy=Sampled(4e12, 0), kernel=Sampled(1e-9, 0))
    found.unaligned = {"bfloat16": {2: Sampled(0.2, 0), 4: Sampled(0.4, 0)}}
    bare = assemble("mine", found, HOST, "cpu", 1, Cluster.load("h200x8")).cluster
    kinds = dict.fromkeys(case.kind for case in cases())
    given = {kind: Traffic(kind, 1.5 + i) for i, kind in enumerate(kinds)}
    given["reduction"] = Traffic("reduction", 1.25, 9e-6)
    given["lookup_gradient"] = Traffic("lookup_gradient", 2.0, 1e-4)
    costs = Costs(
        dataclasses.replace(
            bare, device=dataclasses.replace(bare.device, traffic=tuple(given.values()))
        )
    )
    for case in cases():
        tensors = [
            torch.empty(shape, device="meta", dtype=getattr(torch, case.dtype or "bfloat16"))
            .requires_grad_(case.trains) for shape in case.shapes
        ]  # fmt: skip
        own = tuple(k for k in kernels_of(case.run, tensors) if k.kind == case.kind)
        assert own, case.name
        seconds = sum(costs.kernel(kernel) for kernel in own)
        found.traffic.append(TimedCase(case.name, case.dtype or "bfloat16", own, seconds))
    made = assemble("mine", found, HOST, "cpu", 1, Cluster.load("h200x8"))
    fitted = made.cluster.device
    for kind, traffic in given.items():
        assert fitted.traffic_of[kind].times == pytest.approx(traffic.times)
        assert fitted.traffic_of[kind].start_s == pytest.approx(traffic.start_s)
    assert fitted.matmul[0].aligned_2_fraction == 0.2
    assert fitted.matmul[0].aligned_4_fraction == 0.4
    text = write_cluster(made.cluster, made.spreads)
    assert "[device.traffic.layer_norm]\ntimes = { value = " in text
    assert parse_cluster(text, "mine.toml").device.traffic_of["reduction"].start_s == 9e-6


def test_attention_by_length_is_found_again() -> None:
    device = dataclasses.replace(PLAIN, attention_fraction=0.6, attention_half=30_000.0)
    costs, timed = costs_of(device), []
    for keys, width in ((16384, 64), (2048, 128), (1024, 64), (256, 64)):
        fact = KernelFact("attention", 1e9, 0.0, "float32", (1, 1, keys, keys, width), causal=True)
        timed.append(TimedAttention(keys * width / 2, 1e9, Sampled(costs.kernel(fact), 0)))
    assert fit_attention(timed, [RATE]) == pytest.approx((0.6, 30_000.0))
    assert fit_attention(timed[:1], [RATE])[1] == 0.0


def test_a_cpu_measures_how_it_moves_memory() -> None:
    effort: Effort = dataclasses.replace(QUICK, dtypes=("float32", "bfloat16"))
    found = measure_device("cpu", effort, lambda: None, lambda text: None)
    made = assemble("mine", found, HOST, "cpu", 1, None)
    device = made.cluster.device
    assert set(device.traffic_of) == {case.kind for case in cases()} - {"rms_norm"}  # not fused
    assert all(math.isfinite(t.times) and t.times > 0 for t in device.traffic)
    assert 0 < device.attention_fraction <= 1 and device.attention_half >= 0
    for rate in device.matmul:
        assert 0 < rate.aligned_8_fraction <= 1 and 0 < rate.aligned_4_fraction <= 1
    # The factors are those of these times: what memory bounds is met in the middle.
    costs = Costs.of(made.cluster)
    norms = [case for case in found.traffic if case.kernels[0].kind == "batch_norm"]
    moved = [device.traffic_of["batch_norm"].times * case.copy_s(costs) for case in norms]
    assert sum(m <= c.seconds for m, c in zip(moved, norms, strict=True)) == len(norms) // 2
