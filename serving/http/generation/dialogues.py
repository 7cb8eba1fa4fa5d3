"""Dialogues: from messages and an offer of tools to streams of answers."""

import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from jaxshare.serving.chat import ChatFormat
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.http.errors import bad_request
from jaxshare.serving.http.generation.chat_answers import AnswerDelta, AnswerReader, format_of
from jaxshare.serving.http.generation.fields import SamplingFields
from jaxshare.serving.http.generation.grammars import AskedGrammar
from jaxshare.serving.http.generation.running import Piece, Running, SampledChoice
from jaxshare.serving.http.generation.tool_choice import Offer
from jaxshare.serving.http.service import Service
from jaxshare.serving.inputs import encode_messages

_TAIL_TOKENS = 8
"""Tokens at the end of a prompt, among which an open think block shows."""


@dataclasses.dataclass(frozen=True)
class EncodedDialogue:
    """A dialogue that is encoded.

    Attributes:
      tokens: of the prompt.
      offer: the tools.
      format: of the answers.
      grammar: of the whole answer, or None.
    """

    tokens: list[int]
    offer: Offer
    format: ChatFormat
    grammar: AskedGrammar | None

    def reader(self) -> AnswerReader:
        """Returns a reader for one answer."""
        return AnswerReader(self.format, self.offer)


async def read_dialogue(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    offer: Offer,
    grammar: AskedGrammar | None,
    variables: Mapping[str, Any] | None,
    field: str = "messages",
) -> EncodedDialogue:
    """Encodes a dialogue.

    Args:
      service: with the model.
      messages: as chat templates take them.
      offer: the tools, and what has to be called.
      grammar: that the request asks for.
      variables: of the chat template.
      field: the name of the messages, for errors.

    Raises:
      ApiError: the template refuses it, or a grammar is asked for beside a call that has to come.
    """
    forced = offer.grammar()
    if forced is not None and grammar is not None:
        raise bad_request(
            "tool_choice asks for a call and the request for a text of a certain form; give one",
            "tool_choice",
        )

    def encoded() -> tuple[list[int], ChatFormat]:
        model = service.model
        tokens = encode_messages(model, messages, offer.tools or None, variables)
        tokenizer: Any = model.tokenizer
        tail = tokenizer.decode(tokens[-_TAIL_TOKENS:])
        return tokens, format_of(tokenizer, service.settings.tool_format, offer.tools, tail)

    tokens, format = await service.in_thread(encoded, prompt=field)
    return EncodedDialogue(tokens, offer, format, forced or grammar)


async def start_dialogue(
    service: Service,
    fields: SamplingFields,
    dialogue: EncodedDialogue,
    *,
    n: int,
    max_tokens: int | None,
    logprobs: bool,
    top_logprobs: int,
    field: str = "messages",
) -> Running:
    """Submits the answers to a dialogue; arguments and errors as of `read_dialogue` and `Service.start`."""
    return await service.start(
        fields,
        [dialogue.tokens],
        n=n,
        max_tokens=max_tokens,
        default_max_tokens=None,
        grammar=dialogue.grammar,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        prompt=field,
    )


async def deltas(
    running: Running, readers: Sequence[AnswerReader]
) -> AsyncGenerator[tuple[SampledChoice, list[AnswerDelta], Piece]]:
    """Yields the pieces of answers as they are read, with what they were read from.

    Args:
      running: the choices.
      readers: of each.
    """
    async for piece in running.pieces():
        choice, content = piece
        reader = readers[choice.index]
        if isinstance(content, Completion):
            yield choice, reader.finish(), piece
        else:
            yield choice, reader.feed(content.text), piece
