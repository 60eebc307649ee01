"""Which kernels take the time: names into groups, a host's own times, the questions, the report."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from shardwise.cli import main
from shardwise.lab.exercises.kernels import count_flops, tell
from shardwise.lab.exercises.models import ModelCase
from shardwise.reporting.report import report_run
from shardwise.reporting.run import Run
from shardwise.timeline import Span, Timeline
from shardwise.timeline.kernel_groups import (
    GROUPS,
    Ran,
    computing,
    group_of,
    merge_phases,
    own_times,
    shorten,
    sum_by_group,
    tabulate,
)

NAMES = {
    "products": (
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>(Params)",
        "ampere_sgemm_128x64_tn", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "aten::bmm",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(Params)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(Params)", "forward_hopper_kernel",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "softmax": (
        "void (anonymous namespace)::softmax_warp_forward<float, float, 8>(float*)",
        "aten::_softmax_backward_data",
    ),
    "norms": ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<f>(int)",),
    "elementwise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, "
        "at::native::binary_internal::MulFunctor<float> > >(int)", "aten::silu",
    ),
    "reductions": ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(R)",),
    "copies": (
        "void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda("
        "at::TensorIteratorBase&)::{lambda()#3}>(int)", "Memcpy DtoD (Device -> Device)",
        "aten::copy_",
    ),
    "other": ("aten::as_strided", "aten::embedding_dense_backward", "spin_kernel"),
    "collectives": ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(Args)", "gloo:all_reduce"),
}  # fmt: skip


@pytest.mark.parametrize("group", NAMES)
def test_a_name_tells_the_group_also_shortened(group):
    for name in NAMES[group]:
        assert group_of(name) == group_of(shorten(name)) == group, name
        expected = group if group == "collectives" else "optimizer"
        assert group_of(name, "optimizer") == expected


def test_a_short_name_keeps_what_is_applied():
    assert shorten(NAMES["elementwise"][0]) == "vectorized_elementwise_kernel (MulFunctor)"
    assert shorten(NAMES["copies"][0]) == "elementwise_kernel (direct_copy_kernel_cuda)"
    assert shorten("aten::mm") == "aten::mm"


def test_an_operators_own_time_is_without_what_it_calls():
    ran = own_times([
        ("linear", 0, 100, 1), ("mm", 10, 90, 1), ("t", 2, 5, 1), ("mm", 0, 40, 2),
        ("add", 100, 130, 1),
    ])  # fmt: skip
    assert {(each.name, each.begun): each.ns for each in ran} == {
        ("linear", 0): 17, ("mm", 10): 80, ("t", 2): 3, ("mm", 0): 40, ("add", 100): 30,
    }  # fmt: skip


def test_tables_sum_by_name_phase_and_group():
    ran = [("forward", Ran("aten::mm", 0, 5)), ("forward", Ran("aten::mm", 9, 7))]
    ran += [("backward", Ran("aten::mm", 20, 30)), ("optimizer", Ran("aten::mul", 60, 2))]
    ran += [("backward", Ran("gloo:all_reduce", 30, 400))]
    rows = tabulate(ran)
    assert rows[0]["group"] == "collectives" and set(sum_by_group(rows)) < set(GROUPS)
    assert merge_phases(computing(rows), ("forward", "backward")) == [
        {"name": "aten::mm", "group": "products", "count": 3, "ns": 42}
    ]
    assert sum_by_group(computing(rows)) == {"products": 42, "optimizer": 2}


def test_the_questions_are_answered_from_traces(tmp_path, capsys):
    path, plot = tmp_path / "kernels.json", tmp_path / "kernels.svg"
    assert main(["bench", "kernels", "--quick", "--json", str(path), "--plot", str(plot)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80 and "…" not in said
    assert "document has no answers" in said
    for sentence in tell(row):
        assert sentence[:2] in ("a)", "b)", "c)", "d)", "e)")
    assert 0 < row["busy_ms"] <= row["profiler_ms"] and row["clock_ms"] > 0
    case = ModelCase("small", "fp32", context=row["context"], quick=True)
    layers = case.model_size.layers
    # Of every block: q, k, v, out, gate, up, down; and the head.
    products = {k["name"]: k["calls"] for k in row["kernels"]["forward"]}
    assert products["aten::mm"] == 7 * layers + 1
    for shares in row["shares"].values():
        assert sum(shares.values()) == pytest.approx(1) and shares["products"] > 0
    assert "optimizer" not in row["shares"]["forward"] and row["shares"]["whole step"]["optimizer"]
    assert all(ms > 0 for ms in row["attention_ms"].values())
    assert row["document"][0]["forward"] == 35
    ElementTree.parse(plot)


def test_flops_of_attention_are_those_of_its_shapes():
    case = ModelCase("small", "fp32")
    size, flops = case.model_size, count_flops(case)
    pairs = size.layers * size.heads * case.batch * case.context**2
    assert flops["softmax"] == 5 * pairs and flops["scores"] == 4 * size.head_width * pairs
    tokens = case.batch * case.context
    assert flops["projections"] == 4 * size.layers * 2 * tokens * size.d_model**2


def test_a_report_shows_the_kernels_of_a_phase():
    spans = tuple(Span("forward", "a", "forward", "compute", r, "compute", 0, 9) for r in (0, 1))
    rows = tabulate([("forward", Ran("aten::mm", 0, 6)), ("backward", Ran("aten::mul", 7, 2))])
    run = Run("run", timeline=Timeline(spans), kernels={"ranks": [{"rank": 1, "rows": rows}]})
    (shown,) = report_run(run).data["kernels"]
    assert shown["ranks"]["1"]["step"]["groups"] == {"products": 6, "elementwise": 2}
    assert shown["ranks"]["1"]["forward"]["longest"] == [
        {"name": "aten::mm", "group": "products", "count": 1, "ns": 6}
    ]
    assert shown["ranks"]["1"]["optimizer"]["compute"] == 0
    assert report_run(Run("bare", timeline=Timeline(spans))).data["kernels"] == []
