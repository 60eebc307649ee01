"""A small English grammar that writes the default corpus, so that training needs no download.

Sentences agree in number across nested relative clauses ("the ravens that the miller feeds sleep")
and each noun keeps company with its own verbs, so a model gains from spelling, then from words,
then from context: its loss falls visibly, well below the entropy of single letters.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

# noun, plural, the verbs its subject likes (all regular: the third person adds s)
_NOUNS = (
    ("raven", "ravens", ("watch", "follow", "warn")),
    ("miller", "millers", ("feed", "pay", "trust")),
    ("queen", "queens", ("order", "praise", "trust")),
    ("sailor", "sailors", ("follow", "greet", "help")),
    ("child", "children", ("greet", "follow", "help")),
    ("wolf", "wolves", ("hunt", "follow", "warn")),
    ("teacher", "teachers", ("praise", "help", "warn")),
    ("baker", "bakers", ("feed", "pay", "greet")),
    ("mouse", "mice", ("fear", "follow", "watch")),
    ("judge", "judges", ("order", "pay", "warn")),
)
_INTRANSITIVE = ("sleep", "sing", "wait", "return", "listen")
_ADJECTIVES = ("old", "quiet", "clever", "tired", "young", "gentle")
_PLACES = ("near the river", "under the bridge", "in the mill", "at the gate", "by the sea")
_MAX_DEPTH = 2


class _Writer:
    def __init__(self, seed: int) -> None:
        # Only `random()` is drawn: its sequence is the same in every version of Python.
        self._draw = random.Random(seed).random

    def _pick(self, items: Sequence[T]) -> T:
        # The square favours early items, so that the words differ in frequency as real ones do.
        return items[int(self._draw() ** 2 * len(items))]

    def _verb(self, verbs: tuple[str, ...], plural: bool) -> str:
        verb = self._pick(verbs)
        if plural:
            return verb
        return verb + ("es" if verb.endswith("ch") else "s")

    def _noun_phrase(self, depth: int) -> tuple[str, bool, tuple[str, ...]]:
        """Write a noun phrase; give it with its number and the verbs its noun likes."""
        one, many, verbs = self._pick(_NOUNS)
        plural = self._draw() < 0.4
        words = ["the" if plural or self._draw() < 0.7 else "a"]
        if self._draw() < 0.3:
            words.append(self._pick(_ADJECTIVES))
            if words[0] == "a" and words[1][0] in "aeiou":
                words[0] = "an"
        words.append(many if plural else one)
        if depth < _MAX_DEPTH and self._draw() < 0.25:
            words.append("that")
            if self._draw() < 0.5:
                words.append(self._verb_phrase(plural, verbs, depth + 1))
            else:
                subject, subject_plural, subject_verbs = self._noun_phrase(depth + 1)
                words += [subject, self._verb(subject_verbs, subject_plural)]
        return " ".join(words), plural, verbs

    def _verb_phrase(self, plural: bool, verbs: tuple[str, ...], depth: int) -> str:
        if self._draw() < 0.3:
            return self._verb(_INTRANSITIVE, plural)
        return f"{self._verb(verbs, plural)} {self._noun_phrase(depth + 1)[0]}"

    def sentence(self) -> str:
        subject, plural, verbs = self._noun_phrase(0)
        place = f" {self._pick(_PLACES)}" if self._draw() < 0.3 else ""
        return f"{subject} {self._verb_phrase(plural, verbs, 0)}{place}. "


def write_text(seed: int, characters: int) -> str:
    """Write exactly `characters` characters; the same for the same seed, everywhere."""
    writer = _Writer(seed)
    sentences: list[str] = []
    length = 0
    while length < characters:
        sentences.append(writer.sentence())
        length += len(sentences[-1])
    return "".join(sentences)[:characters]
