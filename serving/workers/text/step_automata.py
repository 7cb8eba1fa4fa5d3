"""Automata over bytes that find the ends of steps, answers and programs, lifted to tokens.

A step is text that ends with a complete sentence and then the separator, outside of code (Hogwild!
Inference, appendices A and C). The automata are exact for any tokenizer once lifted to the bytes of
its tokens: `step_automaton().lift(token_bytes(tokenizer, vocab_size))`.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Set
from typing import Any, Self

from jaxshare.decoding.automaton import ByteAutomaton, TokenAutomaton
from jaxshare.made_once import made_once
from jaxshare.serving.workers.text.codec import Codec, check_separator

STOP_ON = ("answer", "eos", "never")
"""The events that end a session before its budget: a valid answer, a stop token of one worker, or
none."""

SENTENCE_ENDS = ".?!…‽¶❧" + "。！？" + "۔؟" + "।॥" + "։჻።།။។᠃"
"""Characters that end a sentence: of the Latin, Chinese and Japanese, Arabic, Indic, and other
scripts."""

PASSED_OVER = (
    "\"')]*_"
    + "”’»›）」』】"
    + "\u00a0\u3000\u202f\u205f\u2028\u2029"
    + "".join(map(chr, range(0x2000, 0x200B)))
)
"""Characters allowed between the end of a sentence and the separator, besides ASCII whitespace:
closing marks and other spaces."""

BOX = rb"\boxed{"
MAX_NESTING = 16
"""The deepest nesting of braces in a box, its own included; a deeper box is not recognised."""

_SPACES = b" \t\n\r\v\f"
_NEWLINE, _TICK, _BACKSLASH, _OPEN, _CLOSE = b"\n`\\{}"
_FENCES = _TICKS, _TILDES = b"```", b"~~~"
_START, _INFO, _TEXT = b"", "info", "text"
_PROSE, _SPAN, _MATH = "prose", "span", "math"


def step_automaton(separator: str = "\n\n") -> ByteAutomaton:
    r"""Marks the byte that ends a step.

    It completes the separator, after the end of a sentence, in no code block and no formula. A
    sentence ends with one of `SENTENCE_ENDS`; whitespace and `PASSED_OVER` may follow. The text's
    start is the start of a line.

    A code block is the text between two fences. It opens with a line whose first non-blank
    characters are three or more backticks, unless more backticks follow later in that line, or
    three or more tildes; it closes with the next line that starts with three of the same. A
    displayed formula is the text between `$$` and the next `$$`, on one line or many. Neither is
    looked for in a code block, nor the first in code within a line, which lasts from one run of
    backticks to the next or to the end of the line. `\$` is a dollar sign, and a backtick after a
    backslash is one outside of code. The closing fence and the closing `$$` count as the end of a
    sentence.

    A block or a formula that is never closed lasts until the text ends, and so does the step.

    After a mark the automaton reads on; a new step starts at the start state again.

    Raises:
      ValueError: a separator that is empty or is not ASCII whitespace.
    """
    if not separator or separator.encode().strip(_SPACES):
        raise ValueError(
            f"the separator is {separator!r}; it must be whitespace, such as two newlines"
        )
    ends, over = ({c.encode() for c in characters} for characters in (SENTENCE_ENDS, PASSED_OVER))
    return ByteAutomaton.build(
        ((b"", _START), _PROSE, False, b"", 0), _StepRule.of(separator, ends, over)
    )


@dataclasses.dataclass(frozen=True)
class _StepRule:
    """The transitions of `step_automaton`.

    A state is (line, within, ended, partial, matched): the state of `_read_line`; prose, code in a
    line or a formula; whether a sentence has just ended; the bytes so far of a mark or an escape;
    the bytes of the separator matched.

    Attributes:
      separator: ends a step.
      ends: characters that end a sentence; over: those that may follow.
      prefixes: proper prefixes of both.
    """

    separator: bytes
    ends: Collection[bytes]
    over: Collection[bytes]
    prefixes: Collection[bytes]

    @classmethod
    def of(cls, separator: str, ends: Set[bytes], over: Set[bytes]) -> Self:
        prefixes = {c[:n] for c in ends | over for n in range(1, len(c))}
        return cls(separator.encode(), ends, over, prefixes)

    def __call__(self, state: Any, byte: int) -> tuple[Hashable, bool]:
        """(state, byte) -> (the next state, whether the byte ends a step)."""
        (fence, _), within, ended, partial, matched = state
        line, closes = _read_line(state[0], byte)
        if within == _SPAN and (byte == _NEWLINE or line[0]):
            within = _PROSE
        # in a code block, until it closes; or backticks show that none has opened
        if line[0] or fence:
            partial = b"" if line[0] or closes else b"`"
            return (line, within, closes and within != _MATH, partial, 0), False
        if line[1] in _FENCES:  # more characters than three close the block
            return (line, within, within != _MATH, b"", 0), False
        if byte in _SPACES:
            ended = ended and not partial
            matched = _match(self.separator, matched, byte) if ended else 0
            done = ended and matched == len(self.separator)
            return (line, within, ended, b"", matched), done
        if partial == b"\\" and byte in b"\\$`":
            return (line, within, False, b"", 0), False
        if byte == _TICK and within != _MATH:
            if partial != b"`":  # the first of a run
                within = _PROSE if within == _SPAN else _SPAN
            return (line, within, False, b"`", 0), False
        if byte in b"\\$" and within != _SPAN:
            if partial + bytes([byte]) == b"$$":
                return (line, _PROSE if within == _MATH else _MATH, within == _MATH, b"", 0), False
            return (line, within, False, bytes([byte]), 0), False
        if within == _MATH:
            return (line, within, False, b"", 0), False
        return (line, within, *self._read_mark(ended, partial, byte), 0), False

    def _read_mark(self, ended: bool, partial: bytes, byte: int) -> tuple[bool, bytes]:
        """(ended, partial) after a byte of prose.

        A mark may have several bytes. No byte inside one starts another, so a mark that does not
        complete is dropped as a whole.
        """
        seen = partial + bytes([byte])
        if not (seen in self.ends or seen in self.over or seen in self.prefixes):
            ended, seen = False, bytes([byte])
        if seen in self.prefixes:
            return ended and any(c.startswith(seen) for c in self.over), seen
        return seen in self.ends or (seen in self.over and ended), b""


@functools.cache
def code_automaton() -> ByteAutomaton:
    r"""Marks the third backtick or tilde of the line that closes a code block (`step_automaton`).

    For text that goes on inside a block, start at the state after its fence:
    `automaton.read(b"```python\n")[0]`.
    """
    return ByteAutomaton.build((b"", _START), _read_line)


@functools.cache
def box_automaton() -> ByteAutomaton:
    r"""Marks the brace that closes a `\boxed{...}` with something in it.

    Braces nest, up to `MAX_NESTING` deep; inside the box a backslash escapes the next byte. A box
    of nothing but whitespace does not count. A `\boxed{` inside a box that is still open starts a
    new one, so that a box that is never closed does not hide those that follow.
    """

    def step(state: Any, byte: int) -> tuple[Hashable, bool]:
        depth, filled, escaped, matched = state
        matched = _match(BOX, matched, byte)
        if matched == len(BOX):
            return (1, False, False, 0), False
        if not depth:
            return (0, False, False, matched), False
        if not escaped and byte == _CLOSE and depth == 1:
            return (0, False, False, matched), filled
        nested = 0 if escaped else (byte == _OPEN) - (byte == _CLOSE)
        if depth + nested > MAX_NESTING:
            return (0, False, False, matched), False
        return (
            depth + nested,
            filled or byte not in _SPACES,
            not escaped and byte == _BACKSLASH,
            matched,
        ), False

    return ByteAutomaton.build((0, False, False, 0), step)


def _read_line(state: Any, byte: int) -> tuple[tuple[bytes, bytes | str], bool]:
    """Reads a byte of a line, for fences: (state, byte) -> (next state, whether a block closes).

    A state is the fence of the open code block, or b"", and the position in the line: the first
    one, two or three characters of a fence after blanks alone, or none yet; _INFO after backticks
    that open a block; or _TEXT.
    """
    fence, position = state
    if byte == _NEWLINE:
        return (fence, _START), False
    if position == _START and byte in _SPACES:
        return (fence, _START), False
    if isinstance(position, bytes) and len(position) < 3:
        run = position + bytes([byte])
        if not any(whole.startswith(run) for whole in ([fence] if fence else _FENCES)):
            return (fence, _TEXT), False
        if len(run) < 3:
            return (fence, run), False
        return (b"" if fence else run, run), bool(fence)
    if position in _FENCES and byte == position[0]:
        return (fence, position), False
    if fence == _TICKS and position in (_TICKS, _INFO):
        # Backticks after the opening ones: code within the line, no fence.
        return ((b"", _TEXT) if byte == _TICK else (fence, _INFO)), False
    return (fence, _TEXT), False


def _match(pattern: bytes, matched: int, byte: int) -> int:
    """The number of first bytes of `pattern` that end the text after one more byte.

    The first `matched` of them ended it before.
    """
    text = pattern[:matched] + bytes([byte])
    return max(n for n in range(min(len(text), len(pattern)) + 1) if text.endswith(pattern[:n]))


def never() -> ByteAutomaton:
    """The automaton that marks nothing."""
    return ByteAutomaton.build(0, lambda state, byte: (0, False))


@made_once(maxsize=8)
def step_tables(
    codec: Codec, separator: str, answer: Callable[[], ByteAutomaton]
) -> tuple[TokenAutomaton, TokenAutomaton]:
    """The token automata that find the ends of steps and of answers, built once for a tokenizer.

    Args:
      codec: of the model.
      separator: of steps.
      answer: makes the automaton that marks where an answer may close.

    Raises:
      ValueError: a tokenizer that cannot write the separator.
    """
    automaton = step_automaton(separator)
    check_separator(separator, codec.tokenizer, codec.vocabulary)
    return automaton.lift(codec.vocabulary), answer().lift(codec.vocabulary)


@made_once(maxsize=8)
def finisher_tables(
    codec: Codec, prompt: str, automaton: Callable[[], ByteAutomaton]
) -> tuple[TokenAutomaton, TokenAutomaton, int]:
    """The token automata of the early finisher, built once for a tokenizer.

    Returns:
      One that never ends a step, one that finds the end of the answer, and the state of that one
        after the prompt.
    """
    closes = automaton()
    return (
        never().lift(codec.vocabulary),
        closes.lift(codec.vocabulary),
        closes.read(prompt.encode())[0],
    )
