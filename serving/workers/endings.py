"""Where a session of workers looks for the ends of steps and of answers: automata on the tokens of
its tokenizer, made once."""

import functools
from collections.abc import Callable

from jaxshare.decoding.automaton import ByteAutomaton, TokenAutomaton
from jaxshare.serving.workers.step_automata import check_separator, step_automaton
from jaxshare.serving.workers.transcript import Codec

STOP_ON = ("answer", "eos", "never")
"""What ends a session before its budget: a valid answer, or a stop token of one worker, or
nothing."""


def never() -> ByteAutomaton:
    """The automaton that marks nothing."""
    return ByteAutomaton.build(0, lambda state, byte: (0, False))


@functools.lru_cache(maxsize=8)
def tables(
    codec: Codec, separator: str, answer: Callable[[], ByteAutomaton]
) -> tuple[TokenAutomaton, TokenAutomaton]:
    """The automata that find the ends of steps and of answers.

    Args:
      codec: of the model.
      separator: of steps.
      answer: makes what marks where an answer may close.

    Raises:
      ValueError: a tokenizer that cannot write the separator.
    """
    automaton = step_automaton(separator)
    check_separator(separator, codec.tokenizer, codec.vocabulary)
    return automaton.lift(codec.vocabulary), answer().lift(codec.vocabulary)


@functools.lru_cache(maxsize=8)
def finisher_tables(
    codec: Codec, prompt: str, automaton: Callable[[], ByteAutomaton]
) -> tuple[TokenAutomaton, TokenAutomaton, int]:
    """What never ends a step, what finds the end of the answer, and how far that is after the
    prompt."""
    closes = automaton()
    return (
        never().lift(codec.vocabulary),
        closes.lift(codec.vocabulary),
        closes.read(prompt.encode())[0],
    )
