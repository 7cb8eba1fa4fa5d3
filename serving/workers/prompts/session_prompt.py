"""The texts of a session of workers as tokens: its prompt, and what opens steps."""

import dataclasses
from typing import Self

from jaxshare.made_once import made_once
from jaxshare.serving.words import check_tokens
from jaxshare.serving.workers.prompts.format import Format, StepOpening
from jaxshare.serving.workers.roster import Roster
from jaxshare.serving.workers.text.codec import Codec

Openings = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""The tokens that open each of some steps, without and with the question."""


@dataclasses.dataclass(frozen=True)
class SessionTexts:
    """The texts that a session feeds besides what workers sample.

    Attributes:
      codec: text to tokens and back.
      format: prompts and headers.
      prompt: tokens that the prompt's block starts with.
      separator: tokens between two steps.
      bare: the first opening of a worker where steps have no header: the prompt's last token, which
        is then not in `prompt`.
    """

    codec: Codec
    format: Format
    prompt: list[int]
    separator: list[int]
    bare: list[int]

    @classmethod
    def of(cls, codec: Codec, format: Format, problem: str, roster: Roster) -> Self:
        """The texts of a session with these first workers."""
        used = format if roster.layout.moves else dataclasses.replace(format, history_header="")
        prompt = used.prompt_tokens(codec.tokenizer, problem, roster.names)
        check_tokens(prompt, len(codec.vocabulary))
        texts = cls(codec, format, prompt, codec.encode_recurring(format.separator), [])
        if texts.opening(roster, roster.names[0], 1):
            return texts
        return dataclasses.replace(texts, prompt=prompt[:-1], bare=prompt[-1:])

    def opening(self, roster: Roster, name: str, number: int, ask: bool = False) -> list[int]:
        """The tokens that open a step, after the separator.

        Where steps stay in their block there is one header, at its start.
        """
        # The first name stays the first, marked as it is.
        marked, *names = map(self.codec.mark_name, (name, *roster.names))
        if number > 1:
            text = self._later(roster, name).text(marked, number, ask)
        else:
            text = self.format.opening(marked, number, names=names, ask=ask)
        return _tokens(self.codec, text)

    def _later(self, roster: Roster, name: str) -> StepOpening:
        """The text that opens a worker's steps after the first one."""
        header = self.format.step_header if name in roster.layout.moves else ""
        return StepOpening(header, self.format.question)

    def later_openings(self, roster: Roster, name: str, numbers: range) -> "Openings":
        """The openings of a worker's steps, none of them the first; see `opening`."""
        return _later_openings(
            self.codec,
            str(self.codec.tokenizer.chat_template),  # which marks follow
            self._later(roster, name),
            self.codec.mark_name(name),
            numbers,
        )

    def first_opening(self, roster: Roster, name: str) -> list[int]:
        """The tokens that open a worker's first step."""
        return self.bare or [*self.separator, *self.opening(roster, name, 1)]

    def max_opening(self, roster: Roster) -> int:
        """The most tokens of an opening, rounded up so that sessions share programs."""
        openings = [
            self.opening(roster, name, number, True)
            for name in roster.names
            for number in (1, 10**6)
        ]
        longest = max(map(len, openings))
        return longest + -longest % 32

    def said(self, name: str, number: int, text: str) -> list[int]:
        """The tokens of a step that a person says, with the separator before it."""
        opening = self.format.opening(self.codec.mark(name), number)
        return [*self.separator, *self.codec.encode(opening + self.codec.mark(text))]


@made_once(maxsize=64)
def _later_openings(
    codec: Codec, template: str, opening: StepOpening, name: str, numbers: range
) -> Openings:
    """See `SessionTexts.later_openings`. Sessions of one model have many of them in common."""

    def tokens(number: int, ask: bool) -> tuple[int, ...]:
        return tuple(_tokens(codec, opening.text(name, number, ask)))

    return tuple((tokens(number, False), tokens(number, True)) for number in numbers)


def _tokens(codec: Codec, text: str) -> list[int]:
    # A space belongs to the token that comes next.
    return codec.encode_recurring(text.rstrip(" "))
