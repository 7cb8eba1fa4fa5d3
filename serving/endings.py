"""Where a session of workers looks for the ends of steps and of answers: automata on the tokens of its tokenizer, made once."""

import functools
from collections.abc import Callable, Mapping

from jaxshare.automaton import ByteAutomaton, TokenAutomaton
from jaxshare.serving import answers
from jaxshare.serving.steps import box_automaton, check_separator, code_automaton, step_automaton
from jaxshare.serving.transcript import Codec

KINDS: Mapping[str, tuple[Callable[[str], str | None], Callable[[], ByteAutomaton]]] = {
    "box": (answers.boxed, box_automaton), "code": (answers.code, code_automaton)}
"""Of answers: what takes one out of a text, and what finds its end."""


@functools.lru_cache(maxsize=8)
def tables(codec: Codec, separator: str, kind: str) -> tuple[TokenAutomaton, TokenAutomaton]:
    """What finds the ends of steps and of answers.

    Raises:
      ValueError: a tokenizer that cannot write the separator.
    """
    automaton = step_automaton(separator)
    check_separator(separator, codec.tokenizer, codec.vocabulary)
    return automaton.lift(codec.vocabulary), KINDS[kind][1]().lift(codec.vocabulary)


@functools.lru_cache(maxsize=8)
def finisher_tables(codec: Codec, prompt: str, automaton: Callable[[], ByteAutomaton]) -> tuple[TokenAutomaton, TokenAutomaton, int]:
    """What never ends a step, what finds the end of the answer, and how far that is after the prompt."""
    never, closes = ByteAutomaton.build(0, lambda state, byte: (0, False)), automaton()
    return never.lift(codec.vocabulary), closes.lift(codec.vocabulary), closes.read(prompt.encode())[0]
