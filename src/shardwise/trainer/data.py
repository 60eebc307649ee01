"""Training data: a corpus is one long row of token ids, a batch is windows of it.

The tokenizer is the identity on UTF-8 bytes (256 ids): nothing to download, nothing to lose. Text
under any other tokenizer comes in as a token file.

A batch is a pure function of (seed, step, micro-batch, data-parallel rank); nothing is carried from
one batch to the next, so a run that resumes at step n sees what it would have seen.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import UserError
from shardwise.trainer.grammar import write_text

GRAMMAR_BYTES = 1 << 20
TOKEN_DTYPES = ("uint16", "uint32")
# Ids are checked again in each batch, so the scan at the start only has to be likely to find a file
# of the wrong tokenizer, not to read a terabyte.
_SCAN_TOKENS = 1 << 24
_CHECKED_TOKENS = 1 << 20

Tokens = NDArray[Any]


@dataclass(frozen=True)
class Corpus:
    """Token ids of one source, in memory or memory-mapped, all below `vocab`."""

    name: str
    tokens: Tokens
    vocab: int

    def __post_init__(self) -> None:
        self.check(self.tokens[:_SCAN_TOKENS], 0)

    def check(self, window: Tokens, start: int) -> None:
        """Refuse ids that the model has no embedding for; `window` begins at index `start`."""
        if window.size and window.max() >= self.vocab:
            at = int((window >= self.vocab).argmax())
            raise UserError(
                f"{self.name}: token {start + at} has id {window[at]}, but the model's vocabulary "
                f"is {self.vocab} (ids 0 to {self.vocab - 1}): set model.vocab to the tokenizer's, "
                f"and data.token_dtype to the type the file was written in"
            )

    def fingerprint(self) -> str:
        """Tell this corpus from others: its length, and a checksum of its first and last tokens."""
        ends = (self.tokens[:_CHECKED_TOKENS], self.tokens[-_CHECKED_TOKENS:])
        crc = 0
        for end in ends:
            crc = zlib.crc32(np.ascontiguousarray(end).tobytes(), crc)
        return f"{len(self.tokens)} tokens, checksum {crc:08x}"

    def unigram_entropy(self) -> float:
        """Give the entropy of single tokens in nats: the loss of a model that ignores context."""
        counts = np.bincount(self.tokens[:_SCAN_TOKENS])
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def batch(
        self, *, seed: int, step: int, micro: int, rank: int, batch: int, seq: int
    ) -> tuple[Tokens, Tokens]:
        """Draw `batch` windows; give tokens and targets, int64 of shape (batch, seq).

        A target is the token that follows.
        """
        last = len(self.tokens) - seq - 1
        if last < 0:
            raise UserError(
                f"{self.name} has {len(self.tokens)} tokens, but one sequence needs {seq + 1} "
                f"(data.seq + 1): use more text or a smaller data.seq"
            )
        draw = np.random.default_rng([seed, step, micro, rank])
        starts = draw.integers(0, last, size=batch, endpoint=True)
        windows = np.empty((batch, seq + 1), dtype=np.int64)
        for row, start in enumerate(starts):
            window = self.tokens[start : start + seq + 1]
            self.check(window, int(start))
            windows[row] = window
        return windows[:, :-1], windows[:, 1:]


def open_corpus(path: str, *, vocab: int, seed: int, token_dtype: str) -> Corpus:
    """Open a corpus: the grammar's for an empty path, a token file by its suffix, else text.

    - "" writes `GRAMMAR_BYTES` bytes from the built-in grammar with `seed`
    - .npy is a 1-d array of unsigned integers, memory-mapped
    - .bin is raw `token_dtype` ids in little-endian order, memory-mapped
    - anything else is UTF-8 text, whose bytes are the tokens, memory-mapped
    """
    if not path:
        text = write_text(seed, GRAMMAR_BYTES).encode()
        return Corpus("the built-in grammar", np.frombuffer(text, dtype=np.uint8), vocab)
    file = Path(path)
    if not file.is_file():
        raise UserError(f"data file {path} does not exist: give data.path (--data) a file")
    if file.stat().st_size == 0:
        raise UserError(f"data file {path} is empty")
    if file.suffix == ".npy":
        return Corpus(path, _open_npy(file), vocab)
    if file.suffix == ".bin":
        return Corpus(path, _open_bin(file, token_dtype), vocab)
    return Corpus(path, np.memmap(file, dtype=np.uint8, mode="r"), vocab)


def _open_npy(file: Path) -> Tokens:
    try:
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise UserError(f"{file} is not an array of token ids: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind != "u":
        raise UserError(
            f"{file} must be a 1-d array of unsigned integers, got {tokens.dtype} of shape "
            f"{tokens.shape}: save it with numpy.save(file, ids.astype('uint16').ravel())"
        )
    return tokens


def _open_bin(file: Path, token_dtype: str) -> Tokens:
    if token_dtype not in TOKEN_DTYPES:
        raise UserError(f"data.token_dtype must be one of {TOKEN_DTYPES}, got {token_dtype!r}")
    dtype = np.dtype(token_dtype).newbyteorder("<")
    if file.stat().st_size % dtype.itemsize:
        raise UserError(
            f"{file} has {file.stat().st_size} bytes, which is no whole number of {token_dtype} "
            f"ids: set data.token_dtype to the type it was written in"
        )
    return np.memmap(file, dtype=dtype, mode="r")
