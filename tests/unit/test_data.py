import hashlib
import re

import numpy as np
import pytest
import torch

from shardwise.description.language_model import LM
from shardwise.description.preset import SIZES
from shardwise.errors import UserError
from shardwise.trainer.data import GRAMMAR_BYTES, open_corpus
from shardwise.trainer.grammar import write_text


def grammar(seed=0):
    return open_corpus("", vocab=256, seed=seed, token_dtype="uint16")


def draw(corpus, **changes):
    place = {"seed": 0, "step": 3, "micro": 1, "rank": 2, "batch": 4, "seq": 32, **changes}
    return corpus.batch(**place)


def test_the_grammar_is_the_same_everywhere():
    text = write_text(0, 100_000)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "429dfaceeb17cf92"
    assert write_text(1, 1000) != text[:1000]


def test_the_grammar_agrees_in_number_across_a_nested_clause():
    sentence = r"\. the (ravens?) that the millers? (?:feeds?|pays?|trusts?) (\w+)"
    verbs = {"raven": set(), "ravens": set()}
    for subject, verb in re.findall(sentence, write_text(0, GRAMMAR_BYTES)):
        verbs[subject].add(verb)
    assert verbs["raven"] >= {"watches", "follows", "warns"}
    assert verbs["ravens"] >= {"watch", "follow", "warn"}
    assert not verbs["raven"] & verbs["ravens"]


def test_targets_are_the_next_tokens():
    tokens, targets = draw(grammar())
    assert tokens.shape == targets.shape == (4, 32)
    assert tokens.dtype == targets.dtype == np.int64
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])


def test_a_batch_is_a_function_of_seed_step_micro_and_rank():
    corpus = grammar()
    np.testing.assert_array_equal(draw(corpus), draw(grammar()))
    for change in ({"seed": 1}, {"step": 4}, {"micro": 0}, {"rank": 0}):
        assert not np.array_equal(draw(corpus)[0], draw(corpus, **change)[0]), change


def test_a_resumed_run_sees_the_same_batches():
    whole = [draw(grammar(), step=step)[0] for step in range(6)]
    resumed_corpus = grammar()
    resumed = [draw(resumed_corpus, step=step)[0] for step in range(3, 6)]
    np.testing.assert_array_equal(whole[3:], resumed)


def test_every_window_of_the_corpus_can_be_drawn(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(6, dtype=np.uint16))
    corpus = open_corpus(str(tmp_path / "ids.npy"), vocab=6, seed=0, token_dtype="uint16")
    firsts = {int(draw(corpus, step=step, batch=1, seq=3)[0][0, 0]) for step in range(64)}
    assert firsts == {0, 1, 2}


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_are_memory_mapped(tmp_path, dtype):
    ids = np.arange(1000, dtype=dtype)
    ids.tofile(tmp_path / "ids.bin")
    np.save(tmp_path / "ids.npy", ids)
    for name in ("ids.bin", "ids.npy"):
        corpus = open_corpus(str(tmp_path / name), vocab=1000, seed=0, token_dtype=dtype)
        assert isinstance(corpus.tokens, np.memmap)
        np.testing.assert_array_equal(corpus.tokens, ids)


def test_text_becomes_its_utf8_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("naïve ☃", encoding="utf-8")
    corpus = open_corpus(str(tmp_path / "a.txt"), vocab=256, seed=0, token_dtype="uint16")
    assert bytes(corpus.tokens).decode() == "naïve ☃"


def test_an_id_past_the_vocabulary_names_file_index_id_and_vocabulary(tmp_path):
    ids = np.zeros(100, dtype=np.uint16)
    ids[41] = 777
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(UserError, match=r"ids\.npy: token 41 has id 777.*vocabulary is 512"):
        open_corpus(str(tmp_path / "ids.npy"), vocab=512, seed=0, token_dtype="uint16")


def test_an_id_past_the_vocabulary_is_found_beyond_the_first_scan(tmp_path, monkeypatch):
    monkeypatch.setattr("shardwise.trainer.data._SCAN_TOKENS", 10)
    ids = np.zeros(20, dtype=np.uint16)
    ids[15] = 777
    np.save(tmp_path / "ids.npy", ids)
    corpus = open_corpus(str(tmp_path / "ids.npy"), vocab=512, seed=0, token_dtype="uint16")
    with pytest.raises(UserError, match="token 15 has id 777"):
        draw(corpus, batch=1, seq=19)


def write_nothing(file):
    file.write_bytes(b"")


def write_floats(file):
    np.save(file, np.zeros(4))


def write_garbage(file):
    file.write_bytes(b"not an array at all")


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("absent.txt", None, "does not exist"),
        ("empty.txt", write_nothing, "is empty"),
        ("floats.npy", write_floats, "1-d array of unsigned integers, got float64"),
        ("garbage.npy", write_garbage, "not an array of token ids"),
        ("odd.bin", write_garbage, "19 bytes, which is no whole number of uint16 ids"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, name, write, message):
    if write:
        write(tmp_path / name)
    with pytest.raises(UserError, match=message):
        open_corpus(str(tmp_path / name), vocab=256, seed=0, token_dtype="uint16")


def test_a_corpus_shorter_than_a_sequence_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    corpus = open_corpus(str(tmp_path / "a.txt"), vocab=256, seed=0, token_dtype="uint16")
    with pytest.raises(UserError, match="has 5 tokens, but one sequence needs 33"):
        draw(corpus)


def test_a_tiny_model_learns_more_than_the_frequency_of_letters():
    corpus = grammar()
    assert len(corpus.tokens) == GRAMMAR_BYTES
    torch.manual_seed(0)
    lm = LM(SIZES["tiny"], context=64)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
    losses = []
    for step in range(40):
        batch = corpus.batch(seed=0, step=step, micro=0, rank=0, batch=8, seq=64)
        tokens, targets = map(torch.from_numpy, batch)
        loss = lm(tokens, targets) / targets.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 5
    assert sum(losses[-5:]) / 5 < corpus.unigram_entropy() - 0.5
