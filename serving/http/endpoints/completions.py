"""POST /v1/completions: texts that go on from prompts."""

import functools
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from jaxshare.serving.branches.selection import best_of_n
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.http import sse
from jaxshare.serving.http.answers import failed, json_response, service_of, whole
from jaxshare.serving.http.errors import ApiError, bad_request, unsupported
from jaxshare.serving.http.generation.fields import ChoiceFields, ResponseFormat, Token
from jaxshare.serving.http.generation.grammars import grammar_of
from jaxshare.serving.http.generation.logprobs import LogprobCursor, completion_logprobs
from jaxshare.serving.http.generation.running import (
    FINISHED,
    Running,
    SampledChoice,
    usage_of,
    versions_of,
)
from jaxshare.serving.http.identities import new_id
from jaxshare.serving.http.service import Service
from jaxshare.serving.inputs import MOST_LOGPROBS
from jaxshare.serving.scoring import TextScore, prompt_logprobs

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""
_MOST_PROMPTS = 2048

router = APIRouter()

Tokens = Annotated[list[Token], Field(min_length=1)]


class CompletionFields(ChoiceFields):
    """The body of POST /v1/completions."""

    REFUSED: ClassVar = {
        "suffix": "text is sampled after a prompt, not between two",
        "prompt_embeds": "prompts are texts or tokens",
        "prompt_logprobs": "use echo with logprobs",
        "use_beam_search": "completions are sampled",
    }

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=_MOST_PROMPTS)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=_MOST_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = DEFAULT_MAX_TOKENS
    n: Annotated[int, Field(ge=1)] | None = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts as a list."""
        given: Any = self.prompt
        if isinstance(given, str) or isinstance(given[0], int):
            return [given]
        return given


class _CompletionWork:
    """A request that is checked: what its choices are, and how they are written."""

    def __init__(self, service: Service, fields: CompletionFields):
        fields.check_fields()
        self.service, self.fields = service, fields
        self.model = service.check_model(fields.model)
        self.n = fields.n or 1
        self.best_of = fields.best_of or self.n
        self.max_tokens = fields.max_tokens
        service.check_choices(self.best_of * len(fields.prompts()))
        if self.best_of < self.n:
            raise bad_request(f"best_of is {self.best_of}, less than n, {self.n}", "best_of")
        if self.best_of > self.n and fields.stream:
            raise bad_request(
                "best_of is larger than n, which takes all completions to choose from, so they "
                "cannot be streamed; leave one of them out",
                "best_of",
            )
        if self.max_tokens == 0 and not fields.echo:
            raise bad_request(
                "max_tokens is 0, which gives nothing without echo; ask for at least 1",
                "max_tokens",
            )
        if self.max_tokens == 0 and fields.stream:
            raise unsupported("stream", "with max_tokens 0 there is nothing to stream")
        self.head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model,
        }
        self.prompts: list[list[int]] = []
        self.texts: list[str] = []
        self.scores: list[TextScore] = []

    async def prepare(self) -> None:
        """Encodes the prompts, and scores them where they are echoed with log-probabilities."""
        self.service.check_open()
        prompts = self.fields.prompts()
        self.prompts = await self.service.tokens_of(prompts)
        if self.fields.echo:
            for prompt, tokens in zip(prompts, self.prompts, strict=True):
                self.texts.append(
                    prompt if isinstance(prompt, str) else self.service.decode(tokens)
                )
                self.service.room(tokens, self.max_tokens or 1, None)
        if self.fields.echo and self.fields.logprobs is not None:
            for tokens in self.prompts:
                model, top = self.service.model_for(self.model), self.fields.logprobs
                score = functools.partial(prompt_logprobs, model, tokens, top_logprobs=top)
                self.scores.append(await self.service.alone(score))

    async def start(self) -> Running:
        """Submits the choices."""
        fields = self.fields
        return await self.service.start(
            fields,
            self.prompts,
            n=self.best_of,
            max_tokens=self.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            grammar=grammar_of(fields, fields.response_format),
            logprobs=fields.logprobs is not None or self.best_of > self.n,
            top_logprobs=fields.logprobs or 0,
        )

    def choice(self, index: int, prompt: int, completion: Completion | None) -> dict[str, Any]:
        """Returns a choice in OpenAI's form; without a completion, of the prompt alone."""
        head = self.texts[prompt] if self.fields.echo else ""
        reason = "length" if completion is None else FINISHED[completion.finish_reason]
        logprobs = None
        if self.fields.logprobs is not None:
            logprobs = self._logprobs(prompt, completion)
        return {
            "index": index,
            "text": head + (completion.text if completion else ""),
            "logprobs": logprobs,
            "finish_reason": reason,
            **(versions_of(completion) if completion else {}),
            **self.token_ids(completion.tokens if completion else (), prompt),
        }

    def token_ids(self, tokens: Sequence[int], prompt: int | None = None) -> dict[str, Any]:
        """Returns the fields of a choice with its tokens and, if it is given, those of its prompt."""
        if not self.fields.return_token_ids:
            return {}
        head = {} if prompt is None else {"prompt_token_ids": [*self.prompts[prompt]]}
        return {**head, "token_ids": [*tokens]}

    def _logprobs(self, prompt: int, completion: Completion | None) -> dict[str, Any]:
        parts = []
        if self.fields.echo:
            parts.append(self.prompt_logprobs(prompt))
        if completion:
            offset = len(self.texts[prompt]) if self.fields.echo else 0
            parts.append(
                completion_logprobs(
                    self.service.token_texts,
                    completion.tokens,
                    completion.logprobs or (),
                    completion.top_logprobs,
                    offset,
                )
            )
        return _joined(parts)

    def prompt_logprobs(self, prompt: int) -> dict[str, Any]:
        """Returns the log-probabilities of a prompt that is echoed."""
        score = self.scores[prompt]
        return completion_logprobs(
            self.service.token_texts, score.tokens, score.logprobs, score.top_logprobs
        )


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Log-probabilities of texts that follow each other."""
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    has_top = parts[0]["top_logprobs"] is not None
    return {
        key: None
        if key == "top_logprobs" and not has_top
        else [value for part in parts for value in part[key]]
        for key in keys
    }


@router.post("/v1/completions", tags=["OpenAI"])
async def create_completion(body: CompletionFields, request: Request) -> Response:
    """Samples completions of prompts."""
    return await whole(request, complete(service_of(request), body))


async def complete(service: Service, body: CompletionFields) -> Response:
    """Answers a request.

    Raises:
      ApiError: it cannot be served.
    """
    work = _CompletionWork(service, body)
    await work.prepare()
    if work.max_tokens == 0:
        choices = [work.choice(i, i, None) for i in range(len(work.prompts))]
        tokens = sum(map(len, work.prompts))
        usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        return json_response({**work.head, "choices": choices, "usage": usage})
    running = await work.start()
    if work.fields.stream:
        return work.service.stream(running, _events(work, running))
    try:
        done = [*zip(running.choices, await running.finished(), strict=True)]
    finally:
        running.close()
    choices = []
    for prompt in range(len(work.prompts)):
        found = [completion for choice, completion in done if choice.prompt == prompt]
        for completion in _best(found, work.n):
            choices.append(work.choice(len(choices), prompt, completion))
    usage = usage_of([(choice.prompt, completion) for choice, completion in done])
    return json_response({**work.head, "choices": choices, "usage": usage})


def _best(completions: list[Completion], n: int) -> list[Completion]:
    """The n completions of the highest mean log-probability, the best one first."""
    if len(completions) == n:
        return completions
    left, best = [*completions], []
    for _ in range(n):
        best.append(best_of_n(left))
        left.remove(best[-1])
    return best


async def _events(work: _CompletionWork, running: Running) -> AsyncGenerator[bytes]:
    """The events of a stream of chunks."""
    options = work.fields.stream_options
    with_usage = options is not None and options.include_usage
    more = {"usage": None} if with_usage else {}
    cursors = [LogprobCursor() for _ in running.choices]
    sizes = [0 for _ in running.choices]
    begun: set[int] = set()
    done: list[tuple[int, Completion]] = []
    end = b""  # of the stream, which is sent at once

    def chunk(
        choice: SampledChoice,
        text: str,
        logprobs: Any,
        reason: str | None,
        tokens: Sequence[int] = (),
    ) -> bytes:
        sizes[choice.index] += len(text)
        prompt = None if choice.index in begun else choice.prompt
        begun.add(choice.index)
        one = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            **work.token_ids(tokens, prompt),
        }
        return sse.event({**work.head, "choices": [one], **more})

    try:
        if work.fields.echo:
            for choice in running.choices:
                scores = work.prompt_logprobs(choice.prompt) if work.scores else None
                yield chunk(choice, work.texts[choice.prompt], scores, None)
        async for choice, piece in running.pieces():
            logprobs, told = None, cursors[choice.index].next(piece)
            if work.fields.logprobs is not None:
                offset = sizes[choice.index]
                logprobs = completion_logprobs(work.service.token_texts, *told, offset)
            if isinstance(piece, Completion):
                done.append((choice.prompt, piece))
                end = chunk(choice, "", logprobs, FINISHED[piece.finish_reason], told[0])
                if len(done) < len(running.choices):
                    yield end
            else:
                yield chunk(choice, piece.text, logprobs, None, told[0])
        if with_usage:
            end += sse.event({**work.head, "choices": [], "usage": usage_of(done)})
    except ApiError as error:
        end = failed(error)
    yield end + sse.DONE
