"""/v1/responses: answers with a dialogue that the server remembers."""

import dataclasses
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from jaxshare import FinishReason
from jaxshare.serving.chat import FunctionTool
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.http import sse
from jaxshare.serving.http.answers import json_response, owner_of, service_of, whole
from jaxshare.serving.http.endpoints.response_input import Input, messages_of
from jaxshare.serving.http.endpoints.response_output import OutputWriter
from jaxshare.serving.http.endpoints.response_store import ResponseStore
from jaxshare.serving.http.errors import ApiError, unsupported
from jaxshare.serving.http.generation.chat_answers import AnswerReader
from jaxshare.serving.http.generation.dialogues import (
    EncodedDialogue,
    deltas,
    read_dialogue,
    start_dialogue,
)
from jaxshare.serving.http.generation.fields import (
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
)
from jaxshare.serving.http.generation.grammars import grammar_of
from jaxshare.serving.http.generation.logprobs import LogprobCursor, chat_logprobs, shown_tokens
from jaxshare.serving.http.generation.messages import NamedFunction, OfferedFunction
from jaxshare.serving.http.generation.running import FINISHED, Running
from jaxshare.serving.http.generation.tool_choice import offer_of
from jaxshare.serving.http.identities import new_id
from jaxshare.serving.http.service import Service
from jaxshare.serving.inputs import MOST_LOGPROBS

_LOGPROBS = "message.output_text.logprobs"
_LEFT_OUT_INCLUDES = frozenset({"reasoning.encrypted_content"})

router = APIRouter()


class FlatTool(OfferedFunction):
    """A tool of a response, whose function is not a part of its own."""

    type: str
    name: str = ""

    def tool(self) -> FunctionTool:
        """Returns the tool.

        Raises:
          ApiError: it is no function, or its name or schema cannot be used.
        """
        if self.type != "function":
            raise unsupported(
                "tools", f"type {self.type[:32]} is none that clients run; give functions"
            )
        return super().tool()


class FlatNamedTool(NamedFunction):
    """The field `tool_choice` where it names a function."""

    type: Literal["function"]


class TextFormat(BaseModel):
    """The field `text.format`."""

    model_config = ConfigDict(extra="ignore", strict=True, populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")

    def response_format(self) -> ResponseFormat:
        """Returns the form as chats have it."""
        inner = JsonSchemaFormat(schema=self.json_schema)
        return ResponseFormat(type=self.type, json_schema=inner)


class TextOptions(BaseModel):
    """The field `text`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    format: TextFormat | None = None


class ResponseFields(SamplingFields):
    """The body of POST /v1/responses."""

    REFUSED: ClassVar = {
        "background": "a response lives as long as its client waits; leave it out",
        "conversation": "give previous_response_id",
        "prompt": "prompts are not stored; give instructions and input",
        "max_tool_calls": "the server calls nothing",
        "n": "a response has one answer; POST /v1/chat/completions has n",
    }
    LEFT_OUT: ClassVar = SamplingFields.LEFT_OUT | {
        *("reasoning", "safety_identifier", "prompt_cache_key", "verbosity", "stream_options"),
    }

    input: Input
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[list[FlatTool], Field(max_length=256)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = True
    text: TextOptions | None = None
    store: bool | None = True
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def logprobs(self) -> bool:
        """True if log-probabilities are asked for."""
        return _LOGPROBS in (self.include or ())

    def check_fields(self) -> None:
        """Raises ApiError for a field that is refused; logs unknown ones."""
        super().check_fields()
        if self.truncation == "auto":
            raise unsupported("truncation", "a dialogue that is too long is refused")
        for name in self.include or ():
            if name != _LOGPROBS and name not in _LEFT_OUT_INCLUDES:
                raise unsupported("include", f"of these the server has {_LOGPROBS} alone")


@dataclasses.dataclass(frozen=True)
class _ResponseWork:
    """A response that is sampled.

    Attributes:
      service, store, owner, fields: see there.
      dialogue: that it ends.
      messages: of the dialogue without instructions.
      running: its one choice.
      response: as it is at the start.
    """

    service: Service
    store: ResponseStore
    owner: str
    fields: ResponseFields
    dialogue: EncodedDialogue
    messages: list[dict[str, Any]]
    running: Running
    response: dict[str, Any]

    def finished(
        self, completion: Completion, reader: AnswerReader, writer: OutputWriter
    ) -> dict[str, Any]:
        """Returns the response at its end, and stores it."""
        is_whole = FINISHED[completion.finish_reason] == "stop"
        answer, cached = reader.answer(), completion.reused_tokens
        sampled = len(completion.tokens)
        reason = (
            "max_output_tokens"
            if completion.finish_reason is not FinishReason.CANCELLED
            else "time_limit"
        )
        response = {
            **self.response,
            "status": "completed" if is_whole else "incomplete",
            "incomplete_details": None if is_whole else {"reason": reason},
            "output": writer.items,
            "usage": {
                "input_tokens": completion.prompt_tokens,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": completion.prompt_tokens + sampled,
            },
        }
        if self.fields.store is not False:
            said: dict[str, Any] = {"role": "assistant", "content": answer.content}
            if answer.calls:
                said["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in answer.calls
                ]
            self.store.add(self.owner, response, [*self.messages, said])
        return response

    def logprobs(self, cursor: LogprobCursor, piece: Any) -> list[dict[str, Any]]:
        """Returns the log-probabilities of a piece; none where they are not asked for."""
        if not self.fields.logprobs:
            return []
        end = shown_tokens(piece) if isinstance(piece, Completion) else None
        return chat_logprobs(self.service.token_texts, *cursor.next(piece, end))["content"]


def _store_of(request: Request) -> ResponseStore:
    return request.app.state.responses


@router.post("/v1/responses", tags=["OpenAI"])
async def create_response(body: ResponseFields, request: Request) -> Response:
    """Samples an answer, and stores it with its dialogue."""
    store, owner = _store_of(request), owner_of(request)
    return await whole(request, complete(service_of(request), store, owner, body))


async def complete(
    service: Service, store: ResponseStore, owner: str, body: ResponseFields
) -> Response:
    """Answers a request.

    Raises:
      ApiError: it cannot be served.
    """
    body.check_fields()
    service.check_model(body.model)
    work = await _start(service, store, owner, body)
    if body.stream:
        return work.service.stream(work.running, _events(work))
    return await _answer(work)


@router.get("/v1/responses/{identity}", tags=["OpenAI"])
async def retrieve_response(identity: str, request: Request) -> Response:
    """Returns a stored response."""
    return json_response(_store_of(request).get(owner_of(request), identity).response)


@router.delete("/v1/responses/{identity}", tags=["OpenAI"])
async def delete_response(identity: str, request: Request) -> Response:
    """Forgets a stored response."""
    _store_of(request).delete(owner_of(request), identity)
    return json_response({"id": identity, "object": "response", "deleted": True})


async def _start(
    service: Service, store: ResponseStore, owner: str, fields: ResponseFields
) -> _ResponseWork:
    service.check_open()
    earlier = []
    if fields.previous_response_id is not None:
        before = store.get(owner, fields.previous_response_id, "previous_response_id")
        earlier = [*before.messages]
    messages = [*earlier, *messages_of(fields.input, earlier)]
    told = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
    named = fields.tool_choice.name if isinstance(fields.tool_choice, FlatNamedTool) else None
    choice = None if isinstance(fields.tool_choice, FlatNamedTool) else fields.tool_choice
    offer = offer_of(
        [tool.tool() for tool in fields.tools or ()],
        choice,
        named,
        fields.parallel_tool_calls is not False,
    )
    form = fields.text.format.response_format() if fields.text and fields.text.format else None
    grammar, variables = grammar_of(fields, form), fields.chat_template_kwargs
    dialogue = await read_dialogue(
        service, [*told, *messages], offer, grammar, variables, field="input"
    )
    running = await start_dialogue(
        service,
        fields,
        dialogue,
        n=1,
        max_tokens=fields.max_output_tokens,
        logprobs=fields.logprobs,
        top_logprobs=fields.top_logprobs or 0 if fields.logprobs else 0,
        field="input",
    )
    response = _response(service, fields)
    return _ResponseWork(service, store, owner, fields, dialogue, messages, running, response)


def _response(service: Service, fields: ResponseFields) -> dict[str, Any]:
    """The response at its start."""
    choice = fields.tool_choice
    text = fields.text.model_dump(by_alias=True, exclude_none=True) if fields.text else {}
    return {
        "id": new_id("resp_", service.replica),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "model": service.check_model(fields.model),
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": fields.store is not False,
        "temperature": fields.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice.model_dump()
        if isinstance(choice, FlatNamedTool)
        else choice or "auto",
        "tools": [tool.model_dump() for tool in fields.tools or ()],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": fields.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": fields.user,
        "metadata": fields.metadata or {},
    }


async def _answer(work: _ResponseWork) -> Response:
    try:
        (completion,) = await work.running.finished()
    finally:
        work.running.close()
    reader, writer = work.dialogue.reader(), OutputWriter(lambda name, told: None)
    found = [*reader.feed(completion.text), *reader.finish()]
    logprobs = work.logprobs(LogprobCursor(), completion)
    for delta in found:
        is_content = delta.call is None and not delta.thinking
        writer.take(delta, logprobs if is_content else ())
        logprobs = [] if is_content else logprobs
    writer.close("completed" if FINISHED[completion.finish_reason] == "stop" else "incomplete")
    return json_response(work.finished(completion, reader, writer))


async def _events(work: _ResponseWork) -> AsyncGenerator[bytes]:
    """The events of a stream, each with its number."""
    told: list[tuple[str, dict[str, Any]]] = []
    writer, reader = OutputWriter(lambda *one: told.append(one)), work.dialogue.reader()
    logprobs, scores, number = LogprobCursor(), list[dict[str, Any]](), 0
    told += [(name, {"response": work.response}) for name in ("created", "in_progress")]

    def written() -> list[bytes]:
        nonlocal number
        events = []
        for name, more in told:
            kind = f"response.{name}"
            events.append(sse.event({"type": kind, "sequence_number": number, **more}, kind))
            number += 1
        told.clear()
        return events

    for event in written():
        yield event
    try:
        async for _, found, (_, piece) in deltas(work.running, [reader]):
            scores += work.logprobs(logprobs, piece)
            for delta in found:
                is_content = delta.call is None and not delta.thinking
                writer.take(delta, scores if is_content else ())
                scores = [] if is_content else scores
            if isinstance(piece, Completion):
                is_whole = FINISHED[piece.finish_reason] == "stop"
                writer.close("completed" if is_whole else "incomplete")
                response = work.finished(piece, reader, writer)
                told.append((response["status"], {"response": response}))
            for event in written():
                yield event
    except ApiError as error:
        failure = {"code": error.code or "server_error", "message": error.message}
        told.append(
            ("failed", {"response": {**work.response, "status": "failed", "error": failure}})
        )
        for event in written():
            yield event
