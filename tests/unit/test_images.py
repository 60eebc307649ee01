"""Convolutions: their kind, their costs, what calibration says of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from shardwise.calibration.calibrate import assemble
from shardwise.calibration.images import TimedCase, _cases, _draw, kernels_of
from shardwise.calibration.measure import (
    QUICK,
    Effort,
    Findings,
    HostFindings,
    Sampled,
    measure_device,
)
from shardwise.description.cluster import Cluster, Device, MatmulPoint, MatmulRate
from shardwise.description.cluster_toml import parse_cluster, write_cluster
from shardwise.description.model import KernelFact, ModelDescription
from shardwise.predict.cost import Costs
from shardwise.predict.describe import describe

HOST = HostFindings(Sampled(2e-5, 0), Sampled(3e-4, 0), Sampled(4e-5, 0))


def kernels(described: ModelDescription, op: str) -> list[KernelFact]:
    parts = [p for _, s in described.segments for p in (s.forward, s.backward)]
    return [kernel for part in parts for kernel in part.kernels if kernel.op == op]


def pictures(channels_last: bool = False) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.GroupNorm(2, 8),
        nn.ConvTranspose2d(8, 4, 2, 2),
    )
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return model.to(memory_format=layout), torch.randn(2, 3, 6, 6).to(memory_format=layout)  # type: ignore[call-overload]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_convolution_moves_its_images_and_its_weight_once(device: str) -> None:
    described = describe(*pictures(), device=device)
    first, depthwise, up = kernels(described, "convolution")
    big, small, wide = (
        2 * channels * 36 * 4 for channels in (8, 3, 16)
    )  # 4 channels, twice as wide
    assert [k.kind for k in (first, depthwise, up)] == ["convolution"] * 3
    assert first.bytes == small + big + 8 * 3 * 9 * 4
    assert (first.shape, first.batch, first.flops) == ((72, 8, 27), 1, 2 * 72 * 8 * 27)
    assert depthwise.bytes == 2 * big + 8 * 9 * 4
    assert (depthwise.shape, depthwise.batch) == ((72, 1, 9), 8)
    assert [k.is_depthwise for k in (first, depthwise, up)] == [False, True, False]
    assert (up.shape, up.bytes) == ((72, 8, 16), big + wide + 8 * 16 * 4)
    # Each gradient is a product, and moves all three; pictures need none.
    gradients = kernels(described, "convolution_backward")
    assert {k.kind for k in gradients} == {"convolution"}
    assert sorted(k.bytes for k in gradients) == sorted(
        [first.bytes, 2 * depthwise.bytes, 2 * up.bytes]
    )


def test_a_model_that_has_channels_last_does_not_pay_for_plain_images() -> None:
    plain, last = (describe(*pictures(way), device="cuda") for way in (False, True))
    for op in ("convolution", "convolution_backward"):
        assert sorted(k.plain for k in kernels(plain, op)) == [False, True, True]  # not depthwise
        assert not any(k.plain for k in kernels(last, op))
    device = Device(
        "d", 1e9, 1e9, 1.0, 0.0, (MatmulRate("float32", 1e12, 1.0),), plain_image_traffic=2.0
    )
    costs = Costs(dataclasses.replace(Cluster.load("h200x8"), device=device))
    slow, quick = (kernels(described, "convolution")[0] for described in (plain, last))
    assert costs.kernel(slow) == pytest.approx(costs.kernel(quick) + 2.0 * slow.bytes / 1e9)


def test_a_file_says_what_convolutions_reach_and_older_ones_load() -> None:
    older = Cluster.load("cpu-gloo").device
    assert older.plain_image_traffic == 0.0
    assert all(r.convolution_fraction == r.depthwise_fraction == 1.0 for r in older.matmul)
    convolution = KernelFact("convolution", 4e6, 8e3, "float32", (64, 64, 64), plain=True)
    depthwise = dataclasses.replace(convolution, shape=(64, 1, 9), batch=64, plain=False)
    rate = MatmulRate("float32", 1e9, 1.0)
    cluster = Cluster.load("h200x8")
    plain = Device("d", 1e9, 1e9, 1.0, 0.0, (rate,))
    own = dataclasses.replace(rate, convolution_fraction=0.5, depthwise_fraction=0.125)
    told = dataclasses.replace(
        plain,
        matmul=(own,),
        plain_image_traffic=2.5,
    )
    before, after = (Costs(dataclasses.replace(cluster, device=device)) for device in (plain, told))
    assert [before.kernel(k) for k in (convolution, depthwise)] == [4e-3, 4e-3]
    assert [after.kernel(k) for k in (convolution, depthwise)] == pytest.approx(
        [8e-3 + 2e-5, 32e-3]
    )
    # Other products are as they were.
    product = dataclasses.replace(convolution, kind="matmul", plain=False)
    assert after.kernel(product) == before.kernel(product)
    again = parse_cluster(write_cluster(after.cluster), "mine.toml")
    assert again.device == told
    with pytest.raises(ValueError, match="convolution_fraction is 0, expected above 0"):
        dataclasses.replace(rate, convolution_fraction=0)


def test_calibration_finds_the_factors_that_times_were_made_of() -> None:
    points = [MatmulPoint(1024, 1024, 1024, 3e14), MatmulPoint(4096, 4096, 4096, 6e14)]
    found = Findings({"bfloat16": points}, copy=Sampled(4e12, 0), kernel=Sampled(1e-9, 0))
    bare = assemble("mine", found, HOST, "cpu", 1, Cluster.load("h200x8")).cluster
    rate = dataclasses.replace(
        bare.device.matmul[0], convolution_fraction=0.4, depthwise_fraction=0.01
    )
    device = dataclasses.replace(
        bare.device,
        matmul=(rate,),
        plain_image_traffic=2.5,
    )
    costs = Costs(dataclasses.replace(bare, device=device))
    for name, run, shapes, last in _cases(1, 1):
        tensors = _draw(shapes, "meta", torch.bfloat16, last)
        cost = kernels_of(run, tensors)
        seconds = sum(costs.kernel(kernel) for kernel in cost)
        found.images.append(TimedCase(name, "bfloat16", cost, seconds, last))
    made = assemble("mine", found, HOST, "cpu", 1, Cluster.load("h200x8"))
    fitted = made.cluster.device
    assert fitted.matmul[0].convolution_fraction == pytest.approx(0.4)
    assert fitted.matmul[0].depthwise_fraction == pytest.approx(0.01)
    assert fitted.plain_image_traffic == pytest.approx(2.5)
    text = write_cluster(made.cluster, made.spreads)
    told = 'source = "measured by shardwise calibrate'
    for key in ("convolution_fraction", "plain_image_traffic"):
        (line,) = [line for line in text.splitlines() if line.startswith(key)]
        assert told in line and "spread = " in line
    assert parse_cluster(text, "mine.toml").device.matmul[0].convolution_fraction == 0.4


def test_a_cpu_measures_its_images() -> None:
    effort: Effort = dataclasses.replace(QUICK, dtypes=("float32", "bfloat16"))
    found = measure_device("cpu", effort, lambda: None, lambda text: None)
    assert {(i.dtype, i.is_depthwise) for i in found.images} == {
        (dtype, depthwise) for dtype in ("float32", "bfloat16") for depthwise in (True, False)
    }
    device = assemble("mine", found, HOST, "cpu", 1, None).cluster.device
    assert math.isfinite(device.plain_image_traffic) and device.plain_image_traffic >= 0
    for rate in device.matmul:
        for share in (rate.convolution_fraction, rate.depthwise_fraction):
            assert math.isfinite(share) and share > 0
