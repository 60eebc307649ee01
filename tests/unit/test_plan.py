"""The Plan: checks itself at birth, round-trips through JSON, finds units, explains its cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st
from torch import nn

from shardwise import Plan
from shardwise.planning.memory import count_kept, count_sent, show_bytes
from shardwise.planning.strategies import NAMES
from shardwise.planning.units import Cut
from tests.parity.models import Block, Model, build


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_through_json(name: str) -> None:
    plan = Plan.of(
        name,
        mesh=(2, 4) if name == "hsdp" else 8,
        units=[Block],
        compute_dtype=torch.bfloat16,
        sync="last",
        forward_prefetch=2,
    )
    assert Plan.from_json(plan.to_json()) == plan
    resolved = plan.resolve(build("odd"))
    assert Plan.from_json(resolved.to_json()) == resolved
    assert resolved.resolve(build("odd")) == resolved
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.sync = "each"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "mesh", "expected"),
    [
        ("ddp", 4, (4, 1)),
        ("zero3", 4, (1, 4)),
        ("zero1", "8", (1, 8)),
        ("hsdp", "2x4", (2, 4)),
        ("hsdp", (3, 2), (3, 2)),
    ],
)
def test_meshes(name: str, mesh: Any, expected: tuple[int, int]) -> None:
    assert Plan.of(name, mesh=mesh).mesh == expected


@pytest.mark.parametrize(
    ("arguments", "settings", "told"),
    [
        (("zero4",), {}, "Plan.name is 'zero4'.*did you mean 'zero"),
        (("zero3", 0), {}, r"mesh is .*at least 1"),
        (("hsdp", 4), {}, r"hsdp needs mesh=\(replicate, shard\), got 4"),
        (("hsdp", "2xx"), {}, "expected a number or REPLICATExSHARD"),
        (("ddp", (2, 2)), {}, "ddp shards nothing.*use mesh=4"),
        (("zero3", (2, 2)), {}, "Plan.of.'hsdp', mesh=.2, 2., inner='zero3'"),
        (("zero3", 4), {"snyc": "last"}, "no setting 'snyc': did you mean 'sync'"),
        (("zero3", 4), {"sync": "lats"}, "Plan.sync is 'lats'.*did you mean 'last'"),
        (("zero3", 4), {"reduce": "flat"}, "reduce='flat' is a setting of 'ddp'"),
        (("zero3", 4), {"inner": "zero2"}, "inner='zero2' is a setting of 'hsdp'"),
        (("hsdp", (2, 2)), {"inner": "ddp"}, "Plan.inner is 'ddp'"),
        (("zero3", 4), {"reduce_depth": 0}, "reduce_depth is 0, expected a whole number >= 1"),
        (("zero3", 4), {"forward_prefetch": -1}, "forward_prefetch is -1"),
        (("zero3", 4), {"bucket_bytes": 0}, "bucket_bytes is 0"),
        (("zero3", 4), {"keep_after_forward": 3}, "divides the shard axis of 4"),
        (("zero3", 4), {"keep_after_forward": 4}, "divides the shard axis of 4"),
        (("zero2", 4), {"keep_after_forward": 2}, "zero2 keeps them anyway"),
        (("zero3", 4), {"compute_dtype": "bf16"}, "compute_dtype is 'bf16'.*bfloat16"),
        (("zero3", 4), {"gather": "fast"}, "gather is 'fast'"),
        (("zero3", 4), {"units": True}, "units: got True"),
        (("zero3", 4), {"units": -3}, "positive number, got -3"),
        (("zero3", 4), {"units": []}, "units: got"),
        (("zero3", 4), {"average": "yes"}, "average is 'yes', expected true or false"),
        (("zero3", 4), {"whole": 3}, "whole is 3, expected patterns of parameter names"),
        (("zero3", 4), {"whole_below": -1}, "whole_below is -1, expected a whole number of bytes"),
        (("zero3", 4), {"device_mesh": None}, "no setting 'device_mesh'"),
    ],
)
def test_bad_values_are_named(arguments: Any, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Plan.of(*arguments, **settings)


def test_unknown_json_keys_are_errors() -> None:
    text = Plan.of("zero3", mesh=2).to_json().replace('"sync"', '"sink"')
    with pytest.raises(ValueError, match="a Plan has no key 'sink'"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON"),
        ("[1]", "a Plan is a JSON object"),
        ('{"name": "zero3"}', r"a Plan needs \['mesh'\]"),
        ('{"mesh": [1, 2]}', r"a Plan needs \['name'\]"),
        ('{"name": "zero3", "mesh": 2}', r"mesh is 2, expected \[replicate, shard\]"),
        ('{"name": "zero3", "mesh": "1x2"}', r"mesh is '1x2', expected \[replicate, shard\]"),
        ('{"name": "zero3", "mesh": [1, true]}', "Plan.mesh is"),
        ('{"name": "zero3", "mesh": [1, 2], "cut": "blocks"}', "cut is a JSON object"),
        ('{"name": "zero3", "mesh": [1, 2], "cut": {"x": 1}}', "cut has no key 'x'"),
        ('{"name": "zero3", "mesh": [1, 2], "units": "all"}', "units is 'all', expected a list"),
        ('{"name": "zero3", "mesh": [1, 2], "units": [{"name": "a"}]}', "a unit needs"),
        ('{"name": "zero3", "mesh": [1, 2], "bucket_bytes": true}', "bucket_bytes is True"),
    ],
)
def test_a_plan_file_edited_wrongly_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Plan.from_json(text)


def test_small_parameters_of_large_groups_are_kept_whole_where_they_would_be_padding() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4096), nn.Linear(4096, 64, bias=False))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))  # 0-d: never padded

    def kept(ranks: int, mesh: Any = None, **settings: Any) -> set[str]:
        plan = Plan.of("hsdp" if mesh else "zero3", mesh or ranks, **settings).resolve(model)
        assert Plan.from_json(plan.to_json()) == plan
        return {p.name for unit in plan.require_units() if unit.whole for p in unit.parameters}

    assert kept(8) == kept(64) == set()  # no padding in 64 parts of 64 rows
    # 2.weight would be padding too, but 262,144 elements are much to keep on every rank.
    assert kept(128) == kept(4096) == {"0.weight", "0.bias"}
    assert kept(8192) == {"0.weight", "0.bias", "1.bias"}
    assert kept(0, mesh=(512, 8)) == set()  # the shard group counts, not the world
    assert kept(4096, whole_below=0) == set()
    assert kept(4096, whole_below=300) == {"0.bias", "scale"}
    explained = Plan.of("zero3", 4096).resolve(model).explain()
    assert "whole on every rank: 2 tensors, 16.25 KiB" in explained


def test_parameters_kept_whole_are_units_of_their_own() -> None:
    """By name (also a tied one's other name) and by size; JSON, explain; a pattern must match."""
    model = build("odd")
    plan = Plan.of("zero3", 2, whole=["layers.*.norm.*", "head.weight"], whole_below=8)
    units = plan.resolve(model).require_units()
    kept = [p.name for unit in units if unit.whole for p in unit.parameters]
    norms = [f"layers.{i}.norm.{end}" for i in range(3) for end in ("weight", "bias")]
    assert sorted(kept) == sorted([*norms, "embed.weight", *(f"layers.{i}.gate" for i in range(3))])
    assert [unit.whole for unit in units] == [True] + [False] * (len(units) - 1)
    others = [p.name for unit in units if not unit.whole for p in unit.parameters]
    assert sorted(kept + others) == sorted(name for name, _ in model.named_parameters())
    resolved = plan.resolve(model)
    assert Plan.from_json(resolved.to_json()) == resolved == resolved.resolve(build("odd"))
    assert "whole on every rank: 10 tensors" in resolved.explain()
    for name in ("ddp", "zero3"):
        with pytest.raises(ValueError, match=r"whole: '\*.nrom' matches no parameter"):
            Plan.of(name, 2, whole="*.nrom").resolve(model)
    assert not any(u.whole for u in Plan.of("ddp", 2, whole="*").resolve(model).require_units())
    everything = Plan.of("zero3", 2, whole="*").resolve(model)
    assert all(unit.whole for unit in everything.require_units())


def test_averages_are_told() -> None:
    plan = Plan.of("hsdp", (2, 4), average=True)
    assert Plan.from_json(plan.to_json()) == plan and plan.average
    assert "averaged over 8 ranks" in plan.explain()


def names_of(plan: Plan, model: nn.Module) -> dict[str, list[str]]:
    return {u.name: [p.name for p in u.parameters] for u in plan.resolve(model).require_units()}


def test_blocks_are_units_and_the_rest_is_the_roots() -> None:
    units = names_of(Plan.of("zero3", mesh=2), build("even"))
    assert list(units) == ["root", "layers.0", "layers.1", "layers.2"]
    assert units["root"] == ["embed.weight", "head.weight"]


def test_a_large_root_is_cut_like_the_rest() -> None:
    """Its output projection is reduced while backward still runs, its embedding at the end."""
    model = Model(width=64, inner=64)
    model.embed, model.head = nn.Embedding(900, 64), nn.Linear(64, 900, bias=False)
    units = names_of(Plan.of("zero3", mesh=2), model)
    assert list(units)[:2] == ["root:embed.weight", "root:head.weight"]


def test_mixed_dtypes_split_a_unit() -> None:
    units = names_of(Plan.of("zero3", mesh=2), build("odd"))
    assert "layers.0[float32]" in units
    assert units["layers.0[int64]"] == ["layers.0.steps"]


def test_a_tie_across_units_goes_to_their_ancestor() -> None:
    model = build("even")
    model.layers[2].up.weight = model.layers[0].up.weight
    units = names_of(Plan.of("zero3", mesh=2), model)
    roots = [name for unit, names in units.items() if unit.startswith("root") for name in names]
    assert "layers.0.up.weight" in roots
    assert sum(len(names) for names in units.values()) == len(list(model.parameters()))


def test_a_model_without_blocks_is_cut_by_bytes() -> None:
    model = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(6)])
    units = names_of(Plan.of("zero3", mesh=2, bucket_bytes=80_000), model)
    assert list(units) == ["0..1", "2..3", "4..5"]


def test_what_has_no_forward_is_no_unit() -> None:
    """Its hooks would never run. Lists of lists and a bare module as a namespace: Funnel, VAEs."""
    stage = nn.Module()
    stage.block = nn.ModuleList([Block(8, 16)])
    listed = nn.ModuleList([Block(8, 16), nn.ModuleDict({"a": Block(8, 16)})])
    model = nn.Sequential(nn.ModuleList([nn.ModuleList([Block(8, 16)]), stage, listed]))
    plan = Plan.of("zero3", mesh=2)
    assert list(names_of(plan, model)) == ["0.0.0", "0.1.block.0", "0.2.0", "0.2.1.a"]
    flat = nn.Sequential(nn.ParameterList([torch.ones(4)]), nn.Linear(4, 4))
    assert names_of(plan, flat) == {"root": ["0.0"], "1": ["1.weight", "1.bias"]}
    assert list(names_of(Plan.of("zero3", mesh=2, units=1), flat)) == ["root", "1"]
    for units in (nn.ModuleList, "0"):
        with pytest.raises(ValueError, match="match no module with parameters and a forward"):
            Plan.of("zero3", mesh=2, units=units).resolve(model)


def test_what_attention_reads_of_its_projection_is_its_own() -> None:
    """nn.MultiheadAttention never calls `out_proj`."""
    model = nn.Sequential(nn.MultiheadAttention(64, 2), nn.Linear(64, 64))
    attention = ["0.in_proj_weight", "0.in_proj_bias", "0.out_proj.weight", "0.out_proj.bias"]
    for settings in ({"units": 1}, {"bucket_bytes": 4096}):
        units = names_of(Plan.of("zero3", mesh=2, **settings), model)
        assert units == {"0": attention, "1": ["1.weight", "1.bias"]}
    by_class = names_of(Plan.of("zero3", mesh=2, units=nn.Linear), model)
    assert [name for name in by_class if not name.startswith("root")] == ["1"]


def test_units_by_class_pattern_and_count() -> None:
    model = build("even")
    assert list(names_of(Plan.of("zero3", mesh=2, units=nn.Linear), model))[:2] == [
        "root",
        "layers.0.up",
    ]
    assert list(names_of(Plan.of("zero3", mesh=2, units="layers.*"), model))[1:] == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]
    by_count = Plan.of("zero3", mesh=2, units=300).resolve(model).require_units()
    assert all(sum(p.numel for p in u.parameters) >= 300 for u in by_count[:-1])
    with pytest.raises(ValueError, match="match no module"):
        Plan.of("zero3", mesh=2, units="blocks.*").resolve(model)


def test_small_blocks_are_merged_up_to_the_message_size() -> None:
    model = build("even")
    block = sum(p.numel() * 4 for p in model.layers[0].parameters())
    merged = names_of(Plan.of("zero3", mesh=2, bucket_bytes=2 * block), model)
    assert list(merged) == ["root", "layers.0..layers.1", "layers.2"]


def test_ddp_reduces_are_groupings() -> None:
    model = build("even")
    count = len(list(model.parameters()))
    of = lambda reduce, **more: names_of(Plan.of("ddp", mesh=2, reduce=reduce, **more), model)  # noqa: E731
    assert len(of("naive")) == len(of("overlap")) == count
    assert len(of("flat")) == 1
    buckets = of("bucketed", bucket_bytes=1000)
    assert 1 < len(buckets) < count
    assert [n for names in buckets.values() for n in names] == [
        n for n, _ in model.named_parameters()
    ]


def test_cut_parses_what_users_write() -> None:
    assert Cut.parse(None) == Cut.parse("blocks") == Cut()
    assert Cut.parse({"by": "count", "of": 5}) == Cut("count", 5)
    assert Cut.parse([Block, nn.Linear]).of == ("Block", "Linear")


class Squares(nn.Module):
    """Round numbers: 4 blocks of two 1024 x 1024 matrices."""

    def __init__(self) -> None:
        super().__init__()
        square = lambda: nn.Linear(1024, 1024, bias=False)  # noqa: E731
        self.blocks = nn.ModuleList(nn.Sequential(square(), nn.ReLU(), square()) for _ in range(4))


def test_kept_bytes_by_strategy() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([Squares()])
    p = 4 * 2 * 1024 * 1024
    kept = {
        n: count_kept(Plan.of(n, mesh=8).resolve(model)) for n in ("ddp", "zero1", "zero2", "zero3")
    }
    # Behind a rank's part of each reduce: a number for each of its parameters, rounded up to 8.
    counts = 4 * 8
    assert kept["ddp"].master == 4 * p and kept["ddp"].gradients == 4 * p + 4 * counts
    assert kept["ddp"].state == 8 * p and kept["ddp"].full == kept["ddp"].slots == 0
    for name in ("zero1", "zero2", "zero3"):
        assert kept[name].master == 4 * p // 8
        assert kept[name].gradients == 4 * p // 8 + 4 * counts
        assert kept[name].state == 8 * p // 8
    unit = 4 * 2 * 1024 * 1024
    assert kept["zero3"].full == 2 * unit  # the unit in use and the next one
    slot = unit + 8 * counts
    assert kept["zero3"].slots == slot
    # A GPU frees a slot behind its reduce-scatter; a CPU holds them all until backward's end.
    assert kept["zero1"].slots == slot and kept["zero1"].host_slots == 4 * slot
    assert kept["zero2"].full == 4 * p
    for name, full in (("zero3", 2 * unit), ("zero2", 4 * p)):  # and staging of one unit
        packed = Plan.of(name, mesh=8, gather="packed").resolve(model)
        assert count_kept(packed).full == full + unit
    bf16 = count_kept(Plan.of("zero3", mesh=8, compute_dtype="bfloat16").resolve(model))
    assert bf16.full == kept["zero3"].full // 2 and bf16.master == kept["zero3"].master
    last = count_kept(Plan.of("zero3", mesh=8, sync="last").resolve(model), micro_batches=2)
    assert last.accumulators == 4 * slot


def test_sent_bytes_by_strategy() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([Squares()])
    sent = {
        n: count_sent(Plan.of(n, mesh=8).resolve(model)).total
        for n in ("ddp", "zero1", "zero2", "zero3")
    }
    ratios = [sent[n] / sent["ddp"] for n in ("zero1", "zero2", "zero3")]
    assert ratios == pytest.approx([1.0, 1.0, 1.5], rel=2e-5)  # but for the counts
    hybrid = Plan.of("hsdp", mesh=(2, 4)).resolve(model)
    delayed = dataclasses.replace(hybrid, sync="scatter_each_reduce_last")
    assert count_sent(hybrid, 4).all_reduce == 4 * count_sent(delayed, 4).all_reduce
    assert count_sent(hybrid, 4).reduce_scatter == count_sent(delayed, 4).reduce_scatter


def test_explain_says_what_the_functions_count() -> None:
    plan = Plan.of("hsdp", mesh=(2, 4), compute_dtype="bfloat16")
    assert "no model yet" in plan.explain()
    resolved = plan.resolve(build("even"))
    text, kept = resolved.explain(micro_batches=2), count_kept(resolved, 2)
    for count in (
        kept.master, kept.gradients, kept.state, kept.full, kept.slots, kept.host_slots
    ):  # fmt: skip
        assert show_bytes(count) in text
    for count in dataclasses.astuple(count_sent(resolved, 2)):
        assert show_bytes(count) in text
    assert "computed in bfloat16" in text


def test_bytes_for_people() -> None:
    assert [show_bytes(n) for n in (0, 1023, 1536, 3 * 2**30, 5 * 2**50)] == [
        "0 B",
        "1,023 B",
        "1.50 KiB",
        "3.00 GiB",
        "5,120.00 TiB",
    ]


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("zero3", {"reduce_dtype": "bfloat16", "sum_dtype": "float16"}, "Plan.sum_dtype is"),
        ("zero3", {"reduce_dtype": "float32", "sum_dtype": "float32"}, "set reduce_dtype="),
        ("zero3", {"gather_dtype": "float16"}, "Plan.gather_dtype is"),
        ("zero2", {"gather_dtype": "int8"}, "use zero3"),
        ("zero3", {"gather_dtype": "int8", "gather": "each"}, "always packed"),
        ("zero3", {"keep_last": -1}, "a whole number >= 0"),
        ("ddp", {"keep_last": 1}, "keeps them anyway"),
        ("zero3", {"keep_last": 1, "keep_after_forward": True}, "give one of them"),
    ],
)
def test_settings_of_fewer_bytes_are_refused_where_they_do_nothing(
    name: str, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        Plan.of(name, 4, **settings)


def test_fewer_bytes_are_said() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
    plain = Plan.of("zero3", 4, compute_dtype="bfloat16")
    sums = dataclasses.replace(plain, reduce_dtype="bfloat16", sum_dtype="float32")
    codes = dataclasses.replace(plain, gather_dtype="int8")
    kept = dataclasses.replace(plain, keep_last=3)
    sent = [count_sent(plan.resolve(model)) for plan in (plain, sums, codes, kept)]
    assert sent[1].all_to_all == sent[0].reduce_scatter / 2 and not sent[1].reduce_scatter
    assert 0.5 < sent[2].all_gather / sent[0].all_gather < 0.56
    assert sent[3].all_gather == sent[0].all_gather * 9 / 12
    text = sums.resolve(model).explain()
    assert "added in float32" in text and "all-to-all" in text
    assert Plan.from_json(codes.to_json()) == codes


@given(
    name=st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
    ranks=st.sampled_from([1, 2, 64, 128]),
    settings=st.fixed_dictionaries(
        {},
        optional={
            "units": st.sampled_from([5, "blocks", "*.0"]),
            "bucket_bytes": st.sampled_from([64, 10_000]),
            "whole": st.sampled_from([("*.bias",), ("0.*",)]),
            "whole_below": st.sampled_from([None, 0, 100]),
            "keep_after_forward": st.booleans(),
            "compute_dtype": st.just("bfloat16"),
        },
    ),
)
@trials(max_examples=150, deadline=None)
def test_plans_that_say_alike_how_a_model_is_cut_have_the_same_units(name, ranks, settings) -> None:
    plan = Plan.of(name, mesh=ranks, **settings)
    units = plan.resolve(_LAYERS).units
    assert _CUTS.setdefault(plan.cut_by, units) == units


_LAYERS = nn.Sequential(*[nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)) for _ in range(3)])
_CUTS: dict[Any, Any] = {}


class Experts(nn.Module):
    """As Transformers keeps experts: one tensor, a row for each."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(experts, 64, 32))


def test_rows_for_too_few_ranks_are_said_with_the_way_out() -> None:
    model = nn.Sequential(Experts(8), nn.Linear(64, 32))
    told = {}
    for ranks in (8, 32):
        plan = Plan.of("zero3", mesh=ranks, whole_below=0)
        told[ranks] = plan.resolve(model).explain()
    assert "padding" not in told[8]
    assert "padding: '0.up' has 8 rows for 32 ranks. Keep shard groups to 8 ranks" in told[32]
    assert "padding" not in Plan.of("hsdp", mesh=(4, 8)).resolve(model).explain()
    assert "padding" not in Plan.of("ddp", mesh=32).resolve(model).explain()
