import dataclasses
import math

import pytest
import torch
from torch.nn import functional

from shardwise.description import language_model as model_module
from shardwise.description.language_model import LM, Rope, rotate
from shardwise.description.preset import SIZES, Size, parameter_count, size_named
from shardwise.errors import UserError

SMALL = Size(d_model=32, d_ff=48, layers=2, heads=4, kv_heads=4, vocab=50)
GROUPED = dataclasses.replace(SMALL, kv_heads=2)
TIED = dataclasses.replace(SMALL, tied=True)


def build(size=SMALL, context=16, checkpoint="none"):
    torch.manual_seed(0)
    return LM(size, context, checkpoint)


def draw(vocab=50, batch=3, seq=16):
    torch.manual_seed(1)
    return torch.randint(0, vocab, (batch, seq)), torch.randint(0, vocab, (batch, seq))


@pytest.mark.parametrize("name", SIZES)
def test_the_formula_counts_the_parameters_of_every_preset(name):
    with torch.device("meta"):
        lm = LM(SIZES[name], context=8)
    assert parameter_count(SIZES[name]) == sum(p.numel() for p in lm.parameters())


@pytest.mark.parametrize("size", [GROUPED, TIED])
def test_the_formula_counts_grouped_heads_and_tied_embeddings(size):
    assert parameter_count(size) == sum(p.numel() for p in build(size).parameters())


@pytest.mark.parametrize(
    ("name", "millions"), [("tiny", 0.92), ("small", 128.6), ("llama8b", 8030), ("llama70b", 70554)]
)
def test_presets_have_the_published_number_of_parameters(name, millions):
    assert parameter_count(SIZES[name]) / 1e6 == pytest.approx(millions, rel=2e-3)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="'lama8b': did you mean 'llama8b'"):
        size_named("lama8b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "d_model must be heads times an even width"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"kv_heads": 2, "fused_qkv": True}, "need as many kv_heads as heads"),
    ],
)
def test_a_size_checks_itself(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize("size", [SMALL, GROUPED])
def test_a_position_sees_only_the_past(size):
    lm = build(size)
    tokens, _ = draw()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % size.vocab
    before, after = lm(tokens), lm(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)).min() > 1e-6


def test_the_loss_is_the_summed_cross_entropy_without_ignored_targets():
    lm = build()
    tokens, targets = draw()
    targets[0, :5] = -100
    logits = lm(tokens)
    kept = targets != -100
    expected = functional.cross_entropy(logits[kept], targets[kept], reduction="sum")
    torch.testing.assert_close(lm(tokens, targets), expected)


def test_the_initial_loss_is_near_that_of_a_uniform_guess():
    tokens, targets = draw()
    assert build()(tokens, targets).item() / targets.numel() == pytest.approx(
        math.log(50), abs=0.15
    )


def test_rotary_scores_depend_on_the_distance_only():
    rope = Rope(context=64, head_width=8, theta=10_000.0)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8)

    def score(at_q, at_k):
        turned_q = rotate(q, rope.cos_TP[at_q : at_q + 1], rope.sin_TP[at_q : at_q + 1])
        turned_k = rotate(k, rope.cos_TP[at_k : at_k + 1], rope.sin_TP[at_k : at_k + 1])
        return (turned_q * turned_k).sum().item()

    assert score(7, 3) == pytest.approx(score(53, 49), abs=1e-4)
    assert score(0, 0) == pytest.approx((q * k).sum().item(), abs=1e-5)
    assert abs(score(7, 3) - score(7, 6)) > 1e-2


def test_grouped_heads_equal_repeated_key_and_value_heads():
    grouped, full = build(GROUPED), build(SMALL)
    state = grouped.state_dict()
    for name in [n for n in state if n.endswith(("attention.k.weight", "attention.v.weight"))]:
        heads = state[name].unflatten(0, (2, 8))
        state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    tokens, _ = draw()
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_a_tied_head_is_the_embedding():
    lm = build(TIED)
    assert lm.head.weight is lm.embedding.weight


@pytest.mark.parametrize("kind", ["reentrant", "nonreentrant", "op", "first-1", "op-every-2"])
def test_checkpointing_recomputes_and_leaves_the_gradients_as_they_are(kind, monkeypatch):
    calls = []
    attend = model_module.attend
    monkeypatch.setattr(model_module, "attend", lambda *qkv: calls.append(1) or attend(*qkv))
    gradients = {}
    for name in ("none", kind):
        calls.clear()
        lm = build(checkpoint=name)
        lm(*draw()).backward()
        again = {"none": 0, "first-1": 1, "op-every-2": SMALL.layers // 2}.get(name, SMALL.layers)
        assert len(calls) == SMALL.layers + again
        gradients[name] = [p.grad for p in lm.parameters()]
    torch.testing.assert_close(gradients[kind], gradients["none"], rtol=0, atol=0)


def test_it_runs_in_bfloat16_with_fp32_angles_and_loss():
    lm = build()
    expected = lm(*draw()).item()
    for parameter in lm.parameters():
        parameter.data = parameter.data.bfloat16()
    tokens, targets = draw()
    assert lm(tokens).dtype == torch.bfloat16
    loss = lm(tokens, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=5e-3)


def test_buffers_are_shared_and_not_saved():
    lm = build()
    assert lm.layers[0].attention.rope is lm.layers[1].attention.rope
    assert not [name for name in lm.state_dict() if "rope" in name]


def test_a_longer_sequence_than_the_context_is_refused():
    with pytest.raises(ValueError, match=r"sequence of 16 tokens.*at most 8"):
        build(context=8)(draw()[0])


def test_an_unknown_checkpointing_is_refused():
    with pytest.raises(UserError, match="recomputing is 'full', expected one of none"):
        build(checkpoint="full")
