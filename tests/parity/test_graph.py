"""`sw.compile` beside the engine: a Plan as compiled graphs trains to the same parameters."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.engine.engine import engine_of
from shardwise.graph import backend, runtime
from tests.parity.models import VOCABULARY, Block
from tests.ranks import Ranks

STEPS = 5


class Net(nn.Module):
    """Blocks behind an embedding that is also the head; parameters of odd sizes, one that nobody
    uses, a frozen one.
    """

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(Block(8, 12) for _ in range(3))
        self.layers[1].spare = nn.Parameter(torch.ones(5))
        self.layers[2].up.weight.requires_grad_(False)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.odd = nn.Parameter(torch.ones(7))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x * self.scale + self.odd.sum() * 0.1)


@dataclass(frozen=True)
class GraphCase:
    plan: str
    mesh: Any
    micro: tuple[int, ...] = (1,)  # micro-batches of each replica
    recompute: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    compile: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.plan, *map(str, self.micro), *map(str, self.settings.values())]
        return "-".join(
            [*words, *(["recompute"] if self.recompute else []), *map(str, self.compile)]
        )


BF16 = {"compute_dtype": "bfloat16", "reduce_dtype": "float32"}
PASSES = ("bucket", "prefetch", "sort", "cap")
ON_TWO = [
    GraphCase("ddp", 2, (3,), settings={"sync": "last"}),
    GraphCase("ddp", 2, settings=BF16),
    GraphCase("zero1", 2, (2,)),
    GraphCase("zero2", 2, (3,), settings={"average": True}),
    GraphCase("zero2", 2, (2,), settings={"sync": "last", **BF16}),
    GraphCase("zero3", 2, (3,), recompute=True, settings={"sync": "last"}),
    GraphCase("zero3", 2, settings={"keep_after_forward": True, **BF16}),
    GraphCase("zero3", 2, recompute=True, settings={"keep_after_forward": False, **BF16}),
    GraphCase("zero3", 2, settings={"whole": ("*.bias",)}),
    GraphCase("zero3", 2, compile={"passes": ()}),
    GraphCase("zero3", 2, (2,), recompute=True, compile={"passes": PASSES}),
]
ON_FOUR = [
    GraphCase("hsdp", (2, 2), (2, 3), settings={"sync": "scatter_each_reduce_last"}),
    GraphCase("hsdp", (2, 2), (3, 1), recompute=True, settings={"sync": "last", **BF16}),
    GraphCase("hsdp", (2, 2), (2, 0), settings={"sync": "last"}),
    GraphCase("hsdp", (2, 2), settings=BF16, compile={"passes": PASSES}),
    GraphCase("zero3", 4, settings={"average": True}),
]


def train(case: GraphCase, compiled: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Parameters after some steps, and the losses of this rank."""
    torch.manual_seed(0)
    model: nn.Module = Net(case.recompute)
    units = {} if case.plan == "ddp" else {"units": ("layers.*",)}
    plan = sw.Plan.of(case.plan, mesh=case.mesh, **units, **case.settings)
    if compiled:
        sw.compile(model, plan, backend="graph", **case.compile)
    else:
        sw.shard(model, plan)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    replica = engine_of(model).mesh.replicate.rank if len(case.micro) > 1 else 0
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        batches = [
            torch.randint(0, VOCABULARY, (2, 4), generator=draw) for _ in range(case.micro[replica])
        ]
        for tokens in sw.microbatches(model, batches):
            logits = model(tokens).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()
            losses.append(loss.item())
        sw.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(model(torch.arange(4).view(1, 4)).float().sum().item())
    return sw.full_state_dict(model), losses


def compare(case: GraphCase) -> float:
    """The largest difference of a parameter or a loss, in parts of it."""
    torch.compiler.reset()
    expected, losses = train(case, compiled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # falling back is one
        found, its_losses = train(case, compiled=True)
    assert found.keys() == expected.keys()
    worst = [
        float((found[name] - value).abs().max() / (value.abs().max() + 1e-12))
        for name, value in expected.items()
    ]
    pairs = zip(losses, its_losses, strict=True)
    return max([*worst, *(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)], default=0.0)


@pytest.mark.parametrize("case", ON_TWO, ids=str)
def test_graphs_train_as_the_engine_does(two: Ranks, case: GraphCase) -> None:
    assert max(two.run(compare, case)) <= 1e-6


@pytest.mark.parametrize("case", ON_FOUR, ids=str)
def test_graphs_train_as_the_engine_does_on_four(four: Ranks, case: GraphCase) -> None:
    assert max(four.run(compare, case)) <= 1e-6


class Branching(nn.Module):
    """Its forward asks for a value: nobody can trace that whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.sum().item() > 1e9:
                x = x * 2
        return x


class Choosing(Branching):
    """Its forward asks how many rows there are of a kind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            some = (x.sum(1) > 0).nonzero()[:, 0]
            if len(some):
                x = x.index_add(0, some, layer(x[some]))
        return x


def fall_back(kind: type[nn.Module]) -> tuple[str, float]:
    torch.compiler.reset()

    def run(compiled: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = kind()
        plan = sw.Plan.of("zero3", mesh=2, units=("layers.*",))
        sw.compile(model, plan, backend="graph") if compiled else sw.shard(model, plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return sw.full_state_dict(model)["layers.0.weight"]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(compiled=True)
    message = next(str(w.message) for w in caught if "hooks" in str(w.message))
    return message, float((found - run(compiled=False)).abs().max())


def test_a_model_that_cannot_be_traced_runs_by_the_hooks_and_the_line_is_named(two: Ranks) -> None:
    for kind, says in ((Branching, "item()"), (Choosing, "data-dependent")):
        for message, difference in two.run(fall_back, kind):
            assert "test_graph.py:" in message and says in message
            assert difference == 0


def kept_alive() -> int:
    torch.compiler.reset()
    model = Net()
    sw.compile(model, sw.Plan.of("zero3", mesh=2, units=("layers.*",)), backend="graph")
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    left = weakref.ref(model)
    del model
    gc.collect()
    return int(left() is not None)


def test_a_compiled_model_is_freed(two: Ranks) -> None:
    assert two.run(kept_alive) == [0, 0]


def refused() -> str:
    with pytest.raises(ValueError) as caught:
        sw.compile(Net(), sw.Plan.of("zero3", mesh=2), passes=("buckets",))
    return str(caught.value)


def test_an_unknown_pass_is_an_error_at_once(two: Ranks) -> None:
    assert all("'buckets'" in said and "bucket" in said for said in two.run(refused))


def copied() -> list[bool]:
    """Whether a copy trains as its original does, and leaves that alone."""
    torch.compiler.reset()
    model = Net()
    sw.compile(model, sw.Plan.of("zero3", mesh=2, units=("layers.*",)), backend="graph")
    tokens = torch.zeros(1, 2, dtype=torch.long)
    model(tokens).sum().backward()
    twin = copy.deepcopy(model)
    results = []
    for each in (twin, model):
        each.zero_grad()
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(tokens).sum().backward()
        optimizer.step()
        results.append(sw.full_state_dict(each))
    return [torch.equal(results[0][name], value) for name, value in results[1].items()]


def test_a_copy_of_a_compiled_model_is_one(two: Ranks) -> None:
    assert all(map(all, two.run(copied)))


def calls_of(compiled: bool) -> list[tuple[str, str, int]]:
    torch.compiler.reset()
    model = Net()
    plan = sw.Plan.of("zero3", mesh=2, units=("layers.*",))
    sw.compile(model, plan, backend="graph") if compiled else sw.shard(model, plan)
    tokens = torch.zeros(1, 2, dtype=torch.long)
    model(tokens).sum().backward()
    with sw.record() as log:
        model(tokens).sum().backward()
    return [(call.name, call.axis, call.nbytes) for call in log.calls]


def test_a_graph_sends_what_the_plan_says(two: Ranks) -> None:
    """Gathers unit by unit as the engine's, in its order; the engine's scatters carry counts."""
    graph, engine = two.run(calls_of, True)[0], two.run(calls_of, False)[0]
    names = [name for name, _, _ in engine]
    assert sorted(name for name, _, _ in graph) == sorted(names)


def reads_of(plan: str, passes: tuple[str, ...] | None) -> list[str]:
    """Messages of which something that they are packed of might be written before it is packed."""
    torch.compiler.reset()
    model, wrong, seen = Net(), [], set()

    def look(graph: torch.fx.Graph) -> torch.fx.Graph:
        graph = runtime.send_by_groups(graph)
        at = {node: i for i, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            if node.target not in (runtime.SCATTER, runtime.ADD_UP, runtime.GATHER):
                continue
            seen.add(str(node.target).split(".")[1])
            ends = [user for user in node.users if user.target is runtime.LET_GO]
            arrives = [user for user in node.users if user.target is runtime.ARRIVE]
            ok = len(ends) == len(arrives) == 1 and list(ends[0].args[1]) == list(node.args[0])
            if not (ok and at[node] < at[ends[0]] < at[arrives[0]]):
                wrong.append(node.format_node())
        return graph

    plain, backend.send_by_groups = backend.send_by_groups, look
    try:
        chosen = sw.Plan.of(plan, mesh=2, units=("layers.*",), compute_dtype="bfloat16")
        sw.compile(model, chosen, backend="graph", passes=passes)
        model(torch.zeros(1, 2, dtype=torch.long)).float().sum().backward()
    finally:
        backend.send_by_groups = plain
    return wrong or sorted(seen)


def test_what_a_message_is_packed_of_stays_until_it_is(two: Ranks) -> None:
    """Lanes pack beside compute, and torch's compiler uses memory again after its last reader."""
    assert two.run(reads_of, "zero3", None)[0] == ["scatter"]
    assert two.run(reads_of, "ddp", None)[0] == ["add_up"]
    assert two.run(reads_of, "zero3", ("bucket",))[0] == ["gather", "scatter"]


def foreign(kind: str) -> tuple[float, int]:
    """The difference of a Transformers model's loss after some steps, and warnings of ours."""
    transformers = pytest.importorskip("transformers")
    torch.compiler.reset()

    def build() -> nn.Module:
        torch.manual_seed(0)
        if kind == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            )  # fmt: skip
            return transformers.GPT2LMHeadModel(config)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    def run(compiled: bool) -> float:
        model, plan = build(), sw.Plan.of("zero3", mesh=2)
        sw.compile(model, plan, backend="graph") if compiled else sw.shard(model, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens = (torch.arange(16).view(2, 8) + dist.get_rank()) % 64
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(loss)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(compiled=True)
    ours = [str(w.message) for w in caught if "hooks" in str(w.message)]
    assert not ours, ours
    return abs(found - run(compiled=False)), len(ours)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_transformers_are_one_graph(two: Ranks, kind: str) -> None:
    for difference, fell_back in two.run(foreign, kind):
        assert difference <= 1e-5 and not fell_back


def by_inductor() -> float:
    """How far torch's compiler is from running the nodes as they are, after some steps."""
    torch.compiler.reset()

    def run(backend: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
        plan = sw.Plan.of("zero3", mesh=2, units=("0", "2"), **BF16)
        sw.compile(model, plan, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 6) + dist.get_rank()).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return sw.full_state_dict(model)

    found, expected = run("inductor"), run("graph")
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def test_torchs_compiler_runs_the_same_graphs(two: Ranks) -> None:
    assert max(two.run(by_inductor, timeout=280.0)) <= 2e-2  # bf16, rounded in other places


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(3, 8), Block(8, 12)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        y: torch.Tensor = self.heads[head](self.block(self.stem(x)))
        return y * self.scale if head else y


def _accumulate(name: str, mesh: Any, sync: str, several: bool) -> None:
    """Micro-batches that run the model several times, or use other parameters than the last."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    alone, model = TwoHeads(), TwoHeads()
    model.load_state_dict(alone.state_dict())
    sw.compile(model, sw.Plan.of(name, mesh=mesh, sync=sync, average=True), backend="graph")
    opts = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (alone, model)]
    micro = [(torch.randn(4, 3), i % 2) for i in range(3)]
    for _ in range(3):
        for each, opt in zip((alone, model), opts, strict=True):
            for x, head in micro if each is alone else sw.microbatches(model, micro):
                out = each(x, 0) + each(2 * x, 1) if several else each(x, 1 - head)
                out.square().mean().backward()
            opt.step()
            opt.zero_grad()
    assert engine_of(model).stand_in is not None
    for key, ours in sw.full_state_dict(model).items():
        assert torch.allclose(ours, alone.state_dict()[key], atol=1e-6), (name, sync, key)


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_micro_batches_of_other_parameters(two: Ranks, name: str, several: bool) -> None:
    two.run(_accumulate, name, 2, "last", several)


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("sync", ["last", "scatter_each_reduce_last"])
def test_micro_batches_of_other_parameters_on_four(four: Ranks, sync: str, several: bool) -> None:
    four.run(_accumulate, "hsdp", (2, 2), sync, several)


def _run_other_graphs_in_one_step(name: str) -> None:
    """Two graphs of one model that begin with the same parameter, and go on with others."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    alone, model = TwoHeads(), TwoHeads()
    model.load_state_dict(alone.state_dict())
    sw.compile(model, sw.Plan.of(name, mesh=2, average=True), backend="graph")
    x = torch.randn(4, 3)
    for _ in range(2):
        for head in (0, 1, 0):
            assert torch.allclose(model(x, head), alone(x, head), atol=1e-6), (name, head)


def test_graphs_that_begin_alike(two: Ranks) -> None:
    for name in ("ddp", "zero1", "zero2", "zero3"):
        two.run(_run_other_graphs_in_one_step, name)


def _run_once_more_at_the_end() -> None:
    model = sw.compile(TwoHeads(), sw.Plan.of("zero3", mesh=2, sync="last"), backend="graph")
    x = torch.ones(4, 3)
    with pytest.raises(RuntimeError, match="TwoHeads ran 2 times with gradients in a step's last"):
        for i in sw.microbatches(model, [1, 2]):
            sum(model(x, 0).sum() for _ in range(i)).backward()


def test_graphs_that_have_begun_to_sum(two: Ranks) -> None:
    two.run(_run_once_more_at_the_end)
