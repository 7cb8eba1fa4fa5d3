"""POST /v1/chat/completions: answers in dialogues, with thinking, tools and forced forms."""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.http import sse
from jaxshare.serving.http.answers import failed, json_response, service_of, whole
from jaxshare.serving.http.errors import ApiError, bad_request
from jaxshare.serving.http.generation.chat_answers import AnswerDelta, WrittenCall
from jaxshare.serving.http.generation.dialogues import (
    EncodedDialogue,
    deltas,
    read_dialogue,
    start_dialogue,
)
from jaxshare.serving.http.generation.fields import ChoiceFields, ResponseFormat
from jaxshare.serving.http.generation.grammars import grammar_of
from jaxshare.serving.http.generation.logprobs import (
    LogprobCursor,
    chat_logprobs,
    shown_tokens,
)
from jaxshare.serving.http.generation.messages import ChatMessage, NamedTool, OfferedTool
from jaxshare.serving.http.generation.running import (
    FINISHED,
    Running,
    SampledChoice,
    usage_of,
    versions_of,
)
from jaxshare.serving.http.generation.tool_choice import offer_of
from jaxshare.serving.http.identities import new_id
from jaxshare.serving.http.service import Service
from jaxshare.serving.inputs import MOST_LOGPROBS

_MOST_MESSAGES = 4096
_MOST_TOOLS = 256

router = APIRouter()


class ChatFields(ChoiceFields):
    """The body of POST /v1/chat/completions."""

    REFUSED: ClassVar = {
        "audio": "answers are texts",
        "functions": "give tools",
        "function_call": "give tool_choice",
        "prediction": "drafts are taken from earlier answers, with resample",
        "web_search_options": "the server calls nothing",
        "continue_final_message": "an answer starts with a turn of its own",
        "documents": "put them into messages, or into chat_template_kwargs",
        "chat_template": "the template is the checkpoint's",
        "use_beam_search": "answers are sampled",
        "prompt_logprobs": "POST /v1/completions has them, with echo",
    }
    LEFT_OUT: ClassVar = ChoiceFields.LEFT_OUT | {
        *("store", "reasoning_effort", "verbosity", "safety_identifier", "prompt_cache_key"),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=_MOST_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = 1
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    modalities: list[Literal["text"]] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=_MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None


@router.post("/v1/chat/completions", tags=["OpenAI"])
async def create_chat_completion(body: ChatFields, request: Request) -> Response:
    """Samples answers in a dialogue."""
    return await whole(request, complete(service_of(request), body))


async def complete(service: Service, body: ChatFields) -> Response:
    """Answers a request.

    Raises:
      ApiError: it cannot be served.
    """
    body.check_fields()
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs is given without logprobs; set it to true", "top_logprobs")
    head = {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": service.check_model(body.model),
    }
    return await _answer(service, body, head)


async def dialogue_of(service: Service, body: ChatFields) -> EncodedDialogue:
    """Encodes the dialogue of a request.

    Raises:
      ApiError: it cannot be read.
    """
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    choice = None if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    tools = [one.function.tool() for one in body.tools or ()]
    offer = offer_of(tools, choice, named, body.parallel_tool_calls is not False)
    messages = [message.as_dict(i) for i, message in enumerate(body.messages)]
    grammar = grammar_of(body, body.response_format)
    return await read_dialogue(service, messages, offer, grammar, body.chat_template_kwargs)


async def _answer(service: Service, body: ChatFields, head: dict[str, Any]) -> Response:
    service.check_open()
    dialogue = await dialogue_of(service, body)
    running = await start_dialogue(
        service,
        body,
        dialogue,
        n=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
    )
    if body.stream:
        return service.stream(running, _events(service, body, head, dialogue, running))
    try:
        done = await running.finished()
    finally:
        running.close()
    choices = [_choice(service, body, dialogue, i, each) for i, each in enumerate(done)]
    usage = usage_of([(0, each) for each in done])
    ids = {"prompt_token_ids": dialogue.tokens} if body.return_token_ids else {}
    return json_response({**head, "choices": choices, "usage": usage, **ids})


def _choice(
    service: Service, body: ChatFields, dialogue: EncodedDialogue, index: int, done: Completion
) -> dict[str, Any]:
    """A choice in OpenAI's form."""
    reader = dialogue.reader()
    reader.feed(done.text)
    reader.finish()
    answer = reader.answer()
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content or (None if answer.calls else ""),
        "refusal": None,
    }
    if answer.thinking is not None:
        message["reasoning_content"] = answer.thinking
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    logprobs = None
    if done.logprobs is not None:
        told = LogprobCursor().next(done, _told_tokens(body, done))
        logprobs = chat_logprobs(service.token_texts, *told)
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": _reason(done, answer.calls),
        **versions_of(done),
        **({"token_ids": [*done.tokens]} if body.return_token_ids else {}),
    }


def _told_tokens(body: ChatFields, done: Completion) -> int:
    """The number of tokens that the client is told of: a stop token is no part of a message."""
    return len(done.tokens) if body.return_token_ids else shown_tokens(done)


def _call(call: WrittenCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _reason(completion: Completion, calls: Sequence[WrittenCall]) -> str:
    reason = FINISHED[completion.finish_reason]
    return "tool_calls" if calls and reason == "stop" else reason


async def _events(
    service: Service,
    body: ChatFields,
    head: dict[str, Any],
    dialogue: EncodedDialogue,
    running: Running,
) -> AsyncGenerator[bytes]:
    """The events of a stream of chunks."""
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    more = {"usage": None} if with_usage else {}
    readers = [dialogue.reader() for _ in running.choices]
    cursors = [LogprobCursor() for _ in running.choices]
    done: list[Completion] = []
    end = b""  # of the stream, which is sent at once

    def chunk(
        choice: SampledChoice,
        delta: dict[str, Any],
        told: dict[str, Any],
        reason: str | None,
        about: dict[str, Any] = more,
    ) -> bytes:
        one = {
            "index": choice.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": reason,
            **told,
        }
        return sse.event({**head, "choices": [one], **about})

    try:
        ids = {"prompt_token_ids": dialogue.tokens} if body.return_token_ids else {}
        for choice in running.choices:
            first = {"role": "assistant", "content": ""}
            yield chunk(choice, first, {}, None, more if choice.index else {**ids, **more})
        async for choice, found, (_, piece) in deltas(running, readers):
            end_of = _told_tokens(body, piece) if isinstance(piece, Completion) else None
            tokens, logprobs, top = cursors[choice.index].next(piece, end_of)
            told = {}
            if body.logprobs and tokens:
                told["logprobs"] = chat_logprobs(service.token_texts, tokens, logprobs, top)
            if body.return_token_ids and tokens:
                told["token_ids"] = [*tokens]
            written = [_delta(delta) for delta in found] or ([{}] if told else [])
            for i, delta in enumerate(written):
                yield chunk(choice, delta, told if i == 0 else {}, None)
            if isinstance(piece, Completion):
                done.append(piece)
                reason = _reason(piece, readers[choice.index].answer().calls)
                end = chunk(choice, {}, {}, reason)
                if len(done) < len(running.choices):
                    yield end
        if with_usage:
            usage = usage_of([(0, each) for each in done])
            end += sse.event({**head, "choices": [], "usage": usage})
    except ApiError as error:
        end = failed(error)
    yield end + sse.DONE


def _delta(delta: AnswerDelta) -> dict[str, Any]:
    """A piece of an answer in OpenAI's form."""
    if delta.thinking:
        return {"reasoning_content": delta.thinking}
    if delta.call is None:
        return {"content": delta.content}
    call: dict[str, Any] = {"index": delta.call, "function": {"arguments": delta.arguments}}
    if delta.started:
        identity, name = delta.started
        call |= {"id": identity, "type": "function"}
        call["function"] = {"name": name, "arguments": delta.arguments}
    return {"tool_calls": [call]}
