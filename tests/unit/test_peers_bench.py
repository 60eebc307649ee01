"""`shardwise bench peers`: every peer trains as ours does, and one that does not is not timed."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from shardwise.cli import main
from shardwise.emulation.collectives import Network
from shardwise.emulation.run import joined
from shardwise.hosts import refusal
from shardwise.lab.peers import engines, run
from shardwise.lab.steps import cases, models
from shardwise.lab.steps import engines as step_engines
from shardwise.lab.steps.engines import Wrapped
from shardwise.lab.steps.measure import measure, measure_on_networks

TINY = models.MoESize(16, 8, 2, 2, 2, 32, rotary=False, fused_qkv=True, experts=4)


def test_every_expert_trains_in_every_step():
    model = models.build_model(TINY, "cpu")
    tokens = torch.arange(6).view(1, 6)
    model(tokens).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert len(list(model.parameters())) > 2 * 4 * 4  # many small ones
    again = models.build_model(TINY, "cpu")
    assert torch.equal(model(tokens), again(tokens))


def test_real_ranks_are_compared_class_by_class_and_gone_on_with(tmp_path, capsys, monkeypatch):
    path = tmp_path / "peers.json"
    monkeypatch.setitem(run.SMALL, "moe", TINY)
    classes = "replicate,parameters,hybrid"
    command = ["bench", "peers", "--quick", "--ranks", "2", "--models", "moe", "--steps", "2"]
    command += ["--classes", classes, "--json", str(path)]
    assert main([*command, "--peers", "ddp,fsdp1"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    rows = json.loads(path.read_text())["rows"]
    named = [(row["strategy"], row["peer"]) for row in rows]
    assert named == [
        ("ddp", "DDP"), ("ddp", "DDP, views"), ("ddp", "FSDP1 NO_SHARD"),
        ("zero3", "FSDP1 FULL_SHARD"),
    ]  # fmt: skip  # two ranks are no replicas of shards
    for row in rows:
        assert "failure" not in row and row["parity"] <= 1e-5
        assert row["step_ratio"] > 0 and row["ratio_spread"] >= 0 and row["memory_ratio"] > 0
    # All of a class stepped in turn with the same of ours.
    assert rows[0]["ours"] == rows[1]["ours"]
    assert main([*command, "--peers", "ddp", "--resume"]) == 0
    assert json.loads(path.read_text())["rows"] == rows


def _emulated() -> cases.Family:
    """The GPU's first family, on a CPU that plays one rank of eight."""
    family = next(run.emulated_families(("moe",), "cpu"))
    small = {"size": TINY, "batch": 1, "length": 8, "steps": 2, "warmup": 1}
    few = tuple(dataclasses.replace(case, **small) for case in family.cases)
    return dataclasses.replace(family, cases=few)


@pytest.fixture
def one_rank(no_group, monkeypatch):
    monkeypatch.setattr(step_engines, "_meshes", {})
    with joined(0, 8):
        yield


@pytest.mark.usefixtures("one_rank")
def test_emulated_ranks_of_both_generations_are_built_once_for_all_networks(tmp_path, monkeypatch):
    """A run that goes on measures the networks and the peers that have no row."""
    built = []

    def ask(family, function, *given):
        return json.loads(json.dumps(function(*given)))

    def build(size, device):
        built.append(size)
        return models.build_model(size, device)

    monkeypatch.setattr(cases.Family, "ask", ask)
    monkeypatch.setattr(run, "families", lambda arguments: [_emulated()])
    monkeypatch.setattr(run, "build_model", build)
    path = tmp_path / "peers.json"
    command = ["bench", "peers", "--quick", "--json", str(path)]
    assert main(command) == 0
    written = json.loads(path.read_text())
    rows = written["rows"]
    assert len(built) == 2 * 3  # to be timed, and for memory
    assert [row["key"] for row in rows] == [
        f"h200-8-moe-{rate}GBs-eager/parameters/{peer}"
        for rate in (300, 100, 50, 25)
        for peer in ("FSDP1 FULL_SHARD", "FSDP2")
    ]
    for row in rows:
        assert "failure" not in row, row["failure"]
        rate = row["case"].split("-")[3].removesuffix("GBs")
        assert row["parity"] is None
        assert row["settings"]["network"].startswith(f"emulated: {rate} GB/s")
    kept = [row for row in rows if "-100GBs" not in row["case"] and row is not rows[-1]]
    path.write_text(json.dumps(written | {"rows": kept}))
    asked = []
    monkeypatch.setattr(
        run, "compare_groups", lambda groups, quick: [*map(asked.append, groups)][1:]
    )
    assert main([*command, "--resume"]) == 0
    (group,) = asked
    assert [case.name for case in group.family.cases] == [
        "h200-8-moe-100GBs-eager", "h200-8-moe-25GBs-eager",
    ]  # fmt: skip
    assert group.peers == ("FSDP1 FULL_SHARD", "FSDP2")
    kept = [row for row in rows if row is not rows[-1]]
    path.write_text(json.dumps(written | {"rows": kept}))
    assert main([*command, "--resume"]) == 0
    assert [case.name for case in asked[1].family.cases] == ["h200-8-moe-25GBs-eager"]
    assert asked[1].peers == ("FSDP2",)


@pytest.mark.usefixtures("one_rank")
def test_a_slower_network_takes_longer_and_failing_on_it_costs_only_oneself():
    family, slow = _emulated(), Network(latency=10e-3)
    fast, *_ = family.cases
    both = (fast, dataclasses.replace(fast, name="slow", network=slow))
    kind = engines.CLASSES["parameters"]

    class Ends(Wrapped):
        def step_on(self, *tokens):
            def step():
                if emulation.network == slow:
                    raise RuntimeError("too slow")

            return step

    builds = {
        "ours": lambda: engines.wrap_ours(kind, models.build_model(TINY, "cpu"), fast.precision),
        "ends": lambda: Ends(torch.nn.Linear(1, 1), None, 1, {}),
    }
    with fast.open_network() as emulation:
        measured = measure_on_networks(family, both, builds, emulation, isolates=True)
    for each in measured:
        assert each.failures == {"ends": "RuntimeError: too slow"}
        assert set(each.sides) == {"ours"}
    soon, late = (min(s.step_ms for s in each.samples["ours"]) for each in measured)
    assert late > 80  # eight collectives and more, one after another
    assert soon < late
    assert len({each.sides["ours"].peak_bytes for each in measured}) == 1


def test_the_gpu_has_every_world_network_model_and_both_kinds_of_blocks():
    families = list(run.emulated_families(("lm", "gpt2", "moe")))
    firsts = [family.cases[0].name for family in families]
    assert firsts == [
        f"h200-{world}-{name}-300GBs-{how}"
        for world in (8, 128)
        for how in ("eager", "compiled")
        for name in ("lm", "gpt2", "moe")
    ]
    names = [case.name for family in families for case in family.cases]
    assert len(names) == len(set(names)) == 2 * 3 * 4 * 2
    assert "h200-128-gpt2-25GBs-compiled" in names
    for family in families:
        alike = {dataclasses.replace(case, name="", network=None) for case in family.cases}
        assert len(alike) == 1


def test_cases_are_chosen_one_by_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = SimpleNamespace(
        cases=("h200",), models=("lm", "gpt2"), only="8-gpt2-50GBs", quick=True, steps=7
    )
    found = [case for family in run.families(asked) for case in family.cases]
    assert [case.name for case in found] == [
        f"h200-{world}-gpt2-50GBs-{how}" for world in (8, 128) for how in ("eager", "compiled")
    ]
    assert {(case.steps, case.warmup, case.size.layers) for case in found} == {(7, 1, 2)}


def _plain(lr: float = 1e-3) -> Wrapped:
    model = models.build_model(TINY, "cpu")
    return Wrapped(model, torch.optim.SGD(model.parameters(), lr=lr), 1, {})


def test_a_peer_that_parts_or_fails_is_not_timed_and_the_others_are(monkeypatch):
    case = cases.StepCase("c", TINY, 1, 8, (), steps=2, warmup=1)
    family = cases.Family((case,), "gloo", 1, 1, "cpu")
    monkeypatch.setattr("shardwise.lab.steps.measure.time_on_ranks", _time)

    def fail() -> Wrapped:
        raise NotImplementedError("no such engine")

    builds = {"ours": _plain, "other": lambda: _plain(1e-2), "broken": fail, "same": _plain}
    measured = measure(family, case, builds, None, isolates=True)
    assert set(measured.sides) == {"ours", "same"} and measured.parity["same"] == 0
    assert "nothing was timed" in measured.failures["other"]
    assert measured.failures["broken"] == "NotImplementedError: no such engine"
    with pytest.raises(NotImplementedError):
        measure(family, case, builds, None)


def _time(step):
    from shardwise.profiling.timing import timer_on

    return timer_on("cpu")(step)


def test_a_peer_that_is_not_installed_is_said(capsys, monkeypatch):
    monkeypatch.setattr(run, "is_installed", lambda kind: kind != "deepspeed")
    monkeypatch.setattr(run, "families", lambda arguments: [])
    assert main(["bench", "peers", "--peers", "deepspeed"]) == 0
    told = capsys.readouterr()
    assert "deepspeed: not installed here, left out" in told.err
    assert "nothing was measured" in told.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "fsdp3"], "unknown peer 'fsdp3'"),
        (["--classes", "zero3"], "unknown class 'zero3'"),
        (["--ranks", "1"], "--ranks is 1, expected at least 2"),
        (["--models", "bert"], "unknown model 'bert'"),
    ],
)
def test_wrong_choices_are_told_before_anything_runs(arguments, message, capsys):
    assert main(["bench", "peers", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(refusal() != "", reason=refusal())
def test_two_hosts_with_a_cable_between_them(tmp_path, monkeypatch):
    path = tmp_path / "peers.json"
    monkeypatch.setitem(run.SMALL, "moe", TINY)
    command = ["bench", "peers", "--quick", "--cases", "hosts", "--rate", "500mbit", "--steps", "2"]
    command += ["--models", "moe", "--classes", "hybrid", "--peers", "fsdp2", "--json", str(path)]
    assert main(command) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["case"], row["peer"]) == ("hosts-500mbit-moe", "FSDP2")
    assert "failure" not in row and row["parity"] <= 1e-5 and row["step_ratio"] > 0
    assert row["settings"]["ranks"] == 4 and "500mbit" in row["settings"]["network"]
