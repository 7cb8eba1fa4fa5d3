"""Needles in a text, for scripts.bench.sharing: a document with facts spread over it, and questions
about them (Hydragen appendix D.3)."""

import dataclasses
import random
import re
from collections.abc import Callable, Sequence

EXAMPLES = 5
"""Answered questions after the document."""
MOST_FACTS = 256
COLORS = (
    "black",
    "blue",
    "brown",
    "gold",
    "gray",
    "green",
    "orange",
    "pink",
    "purple",
    "red",
    "silver",
    "white",
    "yellow",
)

_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_BEGINNINGS = (
    "Ba",
    "Bel",
    "Cor",
    "Da",
    "Fen",
    "Gil",
    "Ha",
    "Jas",
    "Kel",
    "Lo",
    "Mar",
    "Nim",
    "Or",
    "Pip",
    "Ru",
    "Sol",
    "Tam",
    "Vel",
    "Win",
    "Zor",
)
_ENDS = ("bo", "dan", "fi", "gus", "ko", "lix", "mo", "na", "per", "ra", "sky", "ta", "vin", "zo")


class UnfitError(ValueError):
    """The text or the model that was named cannot be used; the message is one sentence that says
    what would do."""


@dataclasses.dataclass(frozen=True)
class Fact:
    """One needle: what the document says, and what is asked about it."""

    name: str
    color: str

    @property
    def sentence(self) -> str:
        return f"The dog named {self.name} has fur that is {self.color}."

    @property
    def question(self) -> str:
        return f"Question: What color is the fur of the dog named {self.name}?\nAnswer:"

    def is_answered(self, text: str) -> bool:
        """True if the first word written after the question is the color."""
        word = re.match(r"\s*([A-Za-z]*)", text)
        return bool(word) and word[1].lower() == self.color


@dataclasses.dataclass(frozen=True)
class Needles:
    """A document, the answered examples after it, and the facts to ask for."""

    document: str
    examples: tuple[Fact, ...]
    facts: tuple[Fact, ...]

    @property
    def prefix(self) -> str:
        """The common prefix of all questions."""
        return f"{self.document}\n\n{_answered(self.examples)}"

    def questions(self, count: int) -> list[Fact]:
        """`count` facts to ask for; with more questions than facts they come again."""
        return [self.facts[i % len(self.facts)] for i in range(count)]


def make_facts(count: int, rng: random.Random) -> list[Fact]:
    """`count` facts about dogs of different names."""
    names = [begin + end for begin in _BEGINNINGS for end in _ENDS]
    return [Fact(name, rng.choice(COLORS)) for name in rng.sample(names, count)]


def hide(text: str, tokens: int, questions: int, count: Callable[[str], int], seed: int) -> Needles:
    """A document with the facts for `questions` questions and for the examples, each once, spread
    evenly over its sentences.

    Args:
      text: the source of the document, from its start.
      tokens: of the common prefix of all questions, at most; it has less than a sentence fewer.
      questions: how many; beyond MOST_FACTS they ask for the same facts again.
      count: tokens of a text.

    Raises:
      UnfitError: the facts alone have more tokens, or the text has too few.
    """
    rng = random.Random(seed)
    facts = make_facts(min(questions, MOST_FACTS) + EXAMPLES, rng)
    examples, asked = tuple(facts[:EXAMPLES]), tuple(facts[EXAMPLES:])
    hidden = rng.sample(facts, len(facts))
    needed = count(Needles(" ".join(fact.sentence for fact in hidden), examples, asked).prefix)
    if needed > tokens:
        raise UnfitError(
            f"--document is {tokens}, but {len(asked)} facts and the examples have {needed} "
            "tokens; ask for a longer document or for fewer questions"
        )
    sentences, kept, used = _sentences(text), 0, needed
    while kept < len(sentences) and used <= tokens:
        used += count(" " + sentences[kept])
        kept += 1
    if used <= tokens:
        raise UnfitError(
            f"--text has {used - needed} tokens, too few for a document of {tokens}; name a longer "
            "text or ask for a shorter document"
        )
    while True:  # tokens may cross the borders of sentences, so the sum can be a little off
        needles = Needles(
            _spread(sentences[:kept], [fact.sentence for fact in hidden]), examples, asked
        )
        if count(needles.prefix) <= tokens or not kept:
            return needles
        kept -= 1


def accuracy(facts: Sequence[Fact], answers: Sequence[str]) -> float:
    """The share of the questions with a right answer."""
    return sum(fact.is_answered(text) for fact, text in zip(facts, answers, strict=True)) / len(
        facts
    )


def _answered(facts: Sequence[Fact]) -> str:
    return "".join(f"{fact.question} {fact.color}\n\n" for fact in facts)


def _sentences(text: str) -> list[str]:
    return [" ".join(sentence.split()) for sentence in _SENTENCE.split(text) if sentence.strip()]


def _spread(sentences: Sequence[str], facts: Sequence[str]) -> str:
    """The document with fact i after (i + 1) / (N + 1) of the sentences."""
    places = [(i + 1) * len(sentences) // (len(facts) + 1) for i in range(len(facts))]
    pieces, done = [], 0
    for at, fact in zip(places, facts, strict=True):
        pieces += [*sentences[done:at], fact]
        done = at
    return " ".join([*pieces, *sentences[done:]])
