"""The texts of a session of workers as tokens: its prompt, and what opens steps."""

import dataclasses
from typing import Any, Self

from jaxshare.serving.workers.prompts.format import Format
from jaxshare.serving.workers.roster import Roster
from jaxshare.serving.workers.transcript import Codec


@dataclasses.dataclass(frozen=True)
class SessionTexts:
    """What a session feeds of itself.

    Attributes:
      codec: text to tokens and back.
      format: prompts and headers.
      prompt: tokens that the prompt's block begins with.
      separator: tokens between two steps.
      bare: what a worker begins with where steps have no header: the prompt's last token, which is
        then not in `prompt`.
    """

    codec: Codec
    format: Format
    prompt: list[int]
    separator: list[int]
    bare: list[int]

    @classmethod
    def of(cls, codec: Codec, format: Format, problem: str, party: Roster) -> Self:
        """Of a session's first workers."""
        tokenizer: Any = codec.tokenizer
        told = format if party.layout.moves else dataclasses.replace(format, history_header="")
        text = told.prompt(tokenizer, problem, party.names)
        prompt = tokenizer.encode(
            text, add_special_tokens=not tokenizer.chat_template, verbose=False
        )
        texts = cls(codec, format, prompt, codec.encode(format.separator), [])
        if texts.opening(party, party.names[0], 1):
            return texts
        return dataclasses.replace(texts, prompt=prompt[:-1], bare=prompt[-1:])

    def opening(self, party: Roster, name: str, number: int, ask: bool = False) -> list[int]:
        """Tokens that open a step, behind the separator. Where steps stay in their block there is
        one header, at its begin."""
        if number > 1 and name not in party.layout.moves:
            text = self.format.question if ask else ""
        else:
            text = self.format.opening(name, number, names=party.names, ask=ask)
        return self.codec.encode(text.rstrip(" "))  # a space belongs to the token that comes next

    def lead(self, party: Roster, name: str) -> list[int]:
        """Tokens that open a worker's first step."""
        return self.bare or [*self.separator, *self.opening(party, name, 1)]

    def longest(self, party: Roster) -> int:
        """Most tokens of an opening, in a multiple, so that sessions share programs."""
        openings = [
            self.opening(party, name, number, True) for name in party.names for number in (1, 10**6)
        ]
        longest = max(map(len, openings))
        return longest + -longest % 32

    def said(self, text: str) -> list[int]:
        """Tokens of a step that a person says, with the separator before it."""
        return [*self.separator, *self.codec.encode(text)]
