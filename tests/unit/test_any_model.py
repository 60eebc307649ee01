"""Planning for models that are nobody's preset: from Python, from a file, from Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import predict
from shardwise.cli import build_parser, main
from shardwise.description.cluster import Cluster
from shardwise.description.foreign import build_model, inputs_of_config, longest_sequence
from shardwise.description.tracing import real_run, trace
from shardwise.description.workload import Workload
from shardwise.errors import UserError
from shardwise.planning.plan import Plan
from shardwise.predict.describe import describe, trace_model
from shardwise.predict.sources import as_source
from tests.unit import foreign_models as foreign

CLUSTER = Cluster.load("h100x8")
FILE = str(Path(foreign.__file__))
TOKENS = torch.randint(0, 100, (4, 16))


def search(model: Any, inputs: Any, **more: Any) -> Any:
    return sw.search(model, CLUSTER, inputs=inputs, strategies=("zero3",), **more)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (foreign.UNet(), ((torch.randn(4, 3, 16, 16),), {"time": torch.ones(4)})),
        (foreign.Tagger(), TOKENS),
        (foreign.Tagger(batch_first=False), lambda count: torch.zeros(16, count).long()),
        (foreign.Patches(), {"image": torch.randn(4, 3, 32, 32)}),
        (
            nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
            {"src": torch.randn(4, 5, 16), "tgt": torch.randn(4, 6, 16)},
        ),
        (foreign.FlexAttention(), torch.randn(2, 128, 32)),
    ],
    ids=["unet", "lstm", "lstm time first", "vit", "encoder-decoder", "flex attention"],
)
def test_any_module_is_planned_for(model: nn.Module, inputs: Any) -> None:
    ranking = search(model, inputs)
    assert ranking[0].step_ms > 0 and ranking[0].plan.resolve(model).units
    assert "real run" not in ranking.explain()
    assert not any(p.grad is not None or p.is_meta for p in model.parameters())


def test_what_a_model_cannot_run_is_left_out_and_said() -> None:
    ranking = search(foreign.ConvNet(), torch.randn(4, 3, 8, 8))
    assert {candidate.workload.micro_batch for candidate in ranking} == {2, 4}
    assert "not tried: 4 x 1 samples" in ranking.explain()
    assert "more than 1 value per channel" in ranking.explain()
    assert "1 x 4 samples" in ranking[0].title and "samples/s" in ranking[0].explain()


def test_a_fused_recurrent_network_computes_what_its_steps_do() -> None:
    """A CPU fuses what is in 32 bits."""
    fused, steps = (
        describe(model, TOKENS, device=device)
        for model, device in ((foreign.Tagger(), "cuda"), (foreign.Tagger().double(), "cpu"))
    )
    assert fused.forward_flops == steps.forward_flops
    assert fused.backward_flops == pytest.approx(steps.backward_flops, rel=0.1)
    on_cpu = describe(foreign.Tagger(), TOKENS, device="cpu")
    launches = [sum(k.count for u in d.units for k in u.kernels) for d in (fused, steps, on_cpu)]
    assert 5 * launches[0] < launches[1]
    if torch.backends.mkldnn.is_available():
        assert launches[2] == launches[0]


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (foreign.Branching(), torch.randn(4, 8)),
        (foreign.WithNumpy(), torch.randn(4, 8)),
        (foreign.Experts(), TOKENS),
    ],
    ids=["branch", "numpy", "eager experts"],
)
def test_what_reads_values_is_traced_in_a_real_run(model: nn.Module, inputs: Any) -> None:
    ranking = search(model, inputs)
    assert {c.workload.checkpoint for c in ranking} == {"none", "nonreentrant"}
    said = ranking.explain()
    assert "cannot run on the meta device" in said and "in a real run of one micro-batch" in said
    with pytest.raises(UserError, match=r"on the meta device.*trace_on='auto'"):
        search(model, inputs, trace_on="meta")


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (foreign.Mapped(), torch.randn(4, 8)),
        (foreign.Neighbours(), torch.randn(6, 8)),
        (foreign.Answering(), torch.randn(4, 8)),
        (nn.Linear(8, 8, dtype=torch.complex64), torch.randn(4, 8, dtype=torch.complex64)),
    ],
    ids=["vmap", "sparse matrix", "dataclass", "complex numbers"],
)
def test_kinds_of_tensors_and_outputs(model: nn.Module, inputs: Any) -> None:
    options = {"compute_dtype": "float32", "loss": foreign.of_anything}
    assert search(model, inputs, **options)[0].step_ms > 0


def test_a_dataclass_needs_no_loss() -> None:
    said = search(foreign.Answering(), torch.randn(4, 8)).explain()
    assert "loss is taken to be the mean of the output" in " ".join(said.split())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.LazyLinear(8)), "parameter '0.weight' of a LazyLinear has no shape yet"),
        (
            nn.Sequential(torch.jit.script(nn.Linear(8, 8))),
            "'0.weight' is in a scripted Linear",
        ),
        (nn.Embedding(8, 8, sparse=True), "is sparse, and shardwise reduces dense ones"),
    ],
    ids=["lazy", "scripted", "sparse gradient"],
)
def test_what_cannot_be_sharded_says_so(model: nn.Module, words: str) -> None:
    inputs = torch.zeros(4, 8) if isinstance(model, nn.Sequential) else torch.zeros(4, 8).long()
    with pytest.raises(UserError, match=words):
        search(model, inputs)
    if isinstance(model, nn.Sequential):
        with pytest.raises(UserError, match=words):
            sw.shard(model, Plan.of("zero3", mesh=1))


def test_a_model_that_bears_no_16_bits_is_told_of_them() -> None:
    with pytest.raises(UserError, match=r"in bfloat16.*--compute-dtype float32"):
        search(foreign.Spectrum(), torch.randn(4, 8))
    assert search(foreign.Spectrum(), torch.randn(4, 8), compute_dtype="float32")


def test_a_long_trace_says_so_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_SLOW", 20)
    with pytest.warns(UserWarning, match="issues very many operators.*shorter sequence"):
        describe(foreign.Tagger(), TOKENS)


def test_a_cluster_is_named_as_on_the_command_line() -> None:
    options = {"inputs": torch.randn(4, 64), "strategies": ("zero3",)}
    model = foreign.Residual(reads=False)
    assert sw.search(model, "h100x8", **options)[0].plan == search(model, options["inputs"])[0].plan
    assert sw.plan(model, "h100x8", **options).world == 8
    with pytest.raises(UserError, match="did you mean 'h100x8'"):
        sw.search(model, "h100x", **options)
    with pytest.raises(UserError, match="cluster is 8, expected a Cluster, or a name"):
        sw.search(model, 8, **options)  # type: ignore[arg-type]


def test_a_real_run_counts_the_experts_that_rows_chose() -> None:
    plan, rows = Plan.of("zero3", 8), TOKENS.numel()
    work = Workload(16, 4)
    _, made = as_source(foreign.Experts(), work).at(plan, work)
    experts, gate, head = 2 * 2 * 2 * 16 * 32, 2 * 16 * 4, 2 * 16 * 100
    assert made.forward_flops == rows * (experts + gate + head)
    _, twice = as_source(foreign.Experts(), work).at(plan, Workload(16, 8))
    assert twice.forward_flops == 2 * made.forward_flops


def test_recomputation_is_derived_under_ddp_too() -> None:
    """Its buckets are no blocks."""
    options = {"world": 2, "strategies": ("ddp",), "checkpoints": ("none", "nonreentrant")}
    found = [
        sw.search(foreign.Residual(reads), CLUSTER, inputs=torch.randn(4096, 64), **options)
        for reads in (False, True)
    ]
    for traced, derived in zip(*(sorted(r, key=_way) for r in found), strict=True):
        assert _way(traced) == _way(derived)
        assert derived.breakdown.compute == pytest.approx(traced.breakdown.compute, rel=0.2)
        assert derived.peak_bytes == pytest.approx(traced.peak_bytes, rel=0.2)


def _way(candidate: Any) -> tuple[str, str, str]:
    work = candidate.workload
    return work.checkpoint, work.split, candidate.show_settings()


def test_other_sizes_are_derived_from_a_long_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model, work = foreign.Tagger(), Workload(16, 8)
    options = {"world": 8, "strategies": ("zero3",)}
    each = sw.search(model, CLUSTER, work, **options)
    monkeypatch.setattr(predict.describe, "LONG_TRACE", 10)
    traced: list[tuple[Any, str]] = []

    def note(model: Any, inputs: Any, **more: Any) -> Any:
        traced.append((inputs.micro_batch, more["checkpoint"]))
        return trace_model(model, inputs, **more)

    monkeypatch.setattr(predict.describe, "trace_model", note)
    once = sw.search(model, CLUSTER, work, **options)
    assert traced == [(1, "none"), (1, "nonreentrant")]
    assert "has very many operators" in once.explain()
    assert once[0].step_ms == pytest.approx(each[0].step_ms, rel=0.1)
    assert once[0].peak_bytes == pytest.approx(each[0].peak_bytes, rel=0.1)


def test_values_that_nobody_has_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = foreign.Experts()
    with pytest.raises(UserError, match=r"is on the meta device.*built on the host"):
        search(model, TOKENS)
    monkeypatch.setattr(real_run, "free_bytes", lambda _: 1000)
    with pytest.raises(UserError, match=r"more than half of the 0\.0 GB that are free on cpu"):
        search(foreign.Experts(), TOKENS)


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (foreign.UNet(), torch.randn(4, 5), r"does not run on the example inputs \(float32\[4,5\]"),
        (foreign.UNet(), [torch.randn(4)] * 3, "takes .*, and the example inputs are"),
        (foreign.UNet(), {"y": torch.randn(4, 3, 16, 16)}, "takes .*y=float32"),
        (foreign.UNet(), None, "needs a Workload, or example inputs"),
        (foreign.UNet(), torch.tensor(3.0), "no tensor with a dim of samples"),
        ("tiny", TOKENS, "is a preset"),
        (42, TOKENS, "a model is an nn.Module"),
    ],
)
def test_wrong_inputs_are_told_in_one_message(model: Any, inputs: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        search(model, inputs)


def test_the_loss_is_the_users_or_said() -> None:
    image = torch.randn(4, 3, 16, 16)
    assert "loss is taken to be the mean" in search(foreign.UNet(), image).explain()
    assert "loss is taken" not in search(foreign.UNet(), image, loss=foreign.mask_loss).explain()
    one = search(foreign.UNet(), image, loss=lambda output: output["mask"].square().mean())
    assert len(one)
    with pytest.raises(UserError, match=r"the loss gave a tensor of shape \(4, 1, 16, 16\)"):
        search(foreign.UNet(), image, loss=lambda output: output["mask"])


def test_parameters_without_gradients_own_no_optimizer_state() -> None:
    def state(model: nn.Module, strategy: str) -> int:
        plan = Plan.of(strategy, 2).resolve(model)
        described = describe(model, torch.randn(2, 64), plan)
        timeline = sw.simulate(plan, described, CLUSTER, Workload(1, 2))
        return timeline.peak().by_role["state"]

    for strategy in ("ddp", "zero3"):
        used = state(foreign.TwoHeads(both=False), strategy)
        assert used > 0 and state(foreign.TwoHeads(), strategy) == used


def ask(capsys: Any, tmp_path: Path, *arguments: str) -> tuple[int, str]:
    """What the command says, and how it ends."""
    asked = ["plan", "--strategies", "zero3", "--top", "2", "--out", str(tmp_path / "plan.json")]
    code = main([*asked, *arguments])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", f"{FILE}:build_unet", "--inputs", "images", "--loss", "mask_loss"], "1 x 4"),
        (["--model", f"{FILE}:UNet", "--inputs", "x:float32[2,3,16,16]", "--samples", "32"],
         "1 x 4"),
        (["--model", f"{FILE}:made", "--inputs", "images"], "1 x 4"),
        (["--model", "tests.unit.foreign_models:Tagger", "--tokens", "512", "--sequence", "16"],
         "tokens/s"),
        (["--model", f"{FILE}:build_reading_values", "--inputs", "tokens:int64[2,16]"],
         "a real run of"),
    ],
    ids=["functions", "text", "instance", "module", "values"],
)  # fmt: skip
def test_the_command_takes_them_by_name(
    arguments: list[str], words: str, capsys: Any, tmp_path: Path
) -> None:
    code, said = ask(capsys, tmp_path, *arguments)
    assert code == 0 and words in said, said
    assert "sw.shard(model, sw.Plan.from_json(" in said
    assert max(len(line) for line in said.splitlines() if str(tmp_path) not in line) <= 80
    assert Plan.from_json((tmp_path / "plan.json").read_text()).world == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", f"{FILE}:fails", "--samples", "8"], "ValueError: no such width"),
        (["--model", f"{FILE}:ends", "--samples", "8"], "it ends the program, by sys.exit(3)"),
        (["--model", f"{FILE}:gives_a_number", "--samples", "8"], "gave a int, expected"),
        (["--model", f"{FILE}:build_une", "--samples", "8"], "did you mean 'build_unet'"),
        (["--model", FILE, "--samples", "8"], f"name the function in it too, as {FILE}:build"),
        (["--model", "config.json", "--samples", "8"], "is given as hf:config.json"),
        (["--model", "absent.py:build", "--samples", "8"], "there is no such file"),
        (["--model", "no.such.module:build", "--samples", "8"], "cannot be imported"),
        (["--model", f"{FILE}:UNet", "--samples", "8"], "give example inputs instead"),
        (["--model", f"{FILE}:Tagger"], "--tokens or --samples of one step is needed"),
        (["--model", f"{FILE}:UNet", "--inputs", "x:float9[2]"], "unknown dtype 'float9'"),
        (["--model", f"{FILE}:UNet", "--inputs", "x:float32[2,0]"], "whole numbers above 0"),
        (["--model", f"{FILE}:UNet", "--inputs", "images", "--tokens", "8"], "no tokens"),
        (["--model", f"{FILE}:UNet", "--inputs", "images", "--samples", "9"], "do not divide"),
        (["--model", f"{FILE}:UNet", "--inputs", "images", "--loss", "mask_los"], "'mask_loss'"),
        (["--model", "tiny", "--inputs", "x:int64[2,8]"], "inputs of its own"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str], words: str, capsys: Any, tmp_path: Path
) -> None:
    code, said = ask(capsys, tmp_path, *arguments)
    assert code == 2 and words in said
    assert "Traceback" not in said


SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2},
    "qwen2": {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2},
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 64},
    "bert": {**SMALL, "intermediate_size": 64,
             "architectures": ["BertForSequenceClassification"]},
    "t5": {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16,
           "vocab_size": 64},
    "mixtral": {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4},
    "vit": {**SMALL, "intermediate_size": 64, "image_size": 32, "patch_size": 8},
    "clip": {"vision_config": {**SMALL, "image_size": 32, "patch_size": 8}},
    "whisper": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 64,
                "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64, "num_mel_bins": 8, "max_source_positions": 20,
                "max_target_positions": 12, "pad_token_id": 0, "decoder_start_token_id": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_of_transformers_need_no_weights(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    work = Workload(16, 2) if kind != "vit" else Workload(1, 2, of="samples")
    source = as_source(f"hf:{file}", work)
    plan = Plan.of("zero3", 8, compute_dtype="bfloat16")
    for checkpoint in ("none", "nonreentrant"):
        again = Workload(work.sequence, 2, of=work.of, checkpoint=checkpoint)
        resolved, made = source.at(plan, again)
        assert made.backward_flops >= 1.7 * made.forward_flops > 0
    assert len(resolved.require_units()) >= 3 and not source.notes
    if kind == "mixtral":  # two layers, two experts of a row, three matrices of an expert
        experts = 2 * 2 * 32 * 3 * (2 * 32 * 64)
        assert made.forward_flops > experts > 0.3 * made.forward_flops


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_experts_of_transformers_need_no_real_run_in_any_dtype(dtype: str, tmp_path: Path) -> None:
    """torch's meta device knows their grouped products in bfloat16 only."""
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mixtral", **CONFIGS["mixtral"]}))
    work, flops = Workload(16, 2), []
    for each in (dtype, "bfloat16"):
        source = as_source(f"hf:{file}", work)
        _, made = source.at(Plan.of("zero3", 8, compute_dtype=each), work)
        assert not source.notes
        flops.append((made.forward_flops, made.backward_flops))
    assert flops[0] == flops[1]


def test_a_config_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    """Also numbers that JSON has none for."""
    transformers = pytest.importorskip("transformers")
    sizes = {**SMALL, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
    file = tmp_path / "config.json"
    transformers.Mamba2Config(**sizes, chunk_size=8).to_json_file(file)
    assert '"__float__"' in file.read_text()
    work = Workload(16, 2)
    _, made = as_source(f"hf:{file}", work).at(Plan.of("zero3", 8), work)
    assert made.backward_flops > made.forward_flops > 0


def test_an_encoder_of_images_with_a_decoder_is_given_both(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    encoder = {"model_type": "vit", **CONFIGS["vit"]}
    decoder = {"model_type": "gpt2", **CONFIGS["gpt2"], "add_cross_attention": True}
    file.write_text(
        json.dumps({"model_type": "vision-encoder-decoder", "encoder": encoder, "decoder": decoder})
    )
    options = ["--cluster", "cpu-gloo", "--world", "2", "--tokens", "64", "--sequence", "16"]
    options += ["--strategies", "zero3", "--out", str(tmp_path / "plan.json")]
    assert main(["plan", "--model", f"hf:{file}", *options]) == 0
    model = build_model(f"hf:{file}")
    assert longest_sequence(model) == 64
    call = inputs_of_config(model, 2, 16)
    assert call is not None
    assert {name: tuple(t.shape) for name, t in call.kwargs.items()} == {
        "pixel_values": (2, 3, 32, 32), "labels": (2, 16),
    }  # fmt: skip


def test_an_unknown_config_says_so(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    wrong = tmp_path / "config.json"
    for text, words in (("{}", "has a model_type"), ("[", "is not JSON"),
                        ('{"model_type": "lama"}', "did you mean 'llama'")):  # fmt: skip
        wrong.write_text(text)
        with pytest.raises(UserError, match=words):
            as_source(f"hf:{wrong}", Workload(16, 2))


def test_a_config_that_says_no_sizes_asks_for_inputs(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("transformers")
    command = ["plan", "--model", "hf:wav2vec2", "--cluster", "cpu-gloo", "--world", "2"]
    assert main([*command, "--tokens", "512", "--sequence", "64"]) != 0
    said = capsys.readouterr().err
    assert "Wav2Vec2Model takes 'input_values'" in said and "--inputs 'input_values:" in said
    assert len(said.strip().splitlines()) == 1


def test_versions_and_lists_are_for_people(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"shardwise {sw.__version__}\n"
    assert main(["plan", "--exercise", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert any(line.startswith("rooflines ") and len(line.split()) > 3 for line in lines)
    commands = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    texts = [command.format_help() for command in commands.values()]
    assert texts and not any("seed 00" in text.lower() for text in texts)
