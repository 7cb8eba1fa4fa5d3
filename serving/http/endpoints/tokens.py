"""POST /tokenize, /detokenize and /v1/score: tokens of texts, and their log-probabilities."""

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from jaxshare.serving.http.answers import json_response, service_of, whole
from jaxshare.serving.http.errors import bad_request
from jaxshare.serving.http.generation.dialogues import read_dialogue
from jaxshare.serving.http.generation.fields import Body, Token
from jaxshare.serving.http.generation.messages import ChatMessage, OfferedTool
from jaxshare.serving.http.generation.tool_choice import offer_of
from jaxshare.serving.http.identities import new_id
from jaxshare.serving.http.service import Service
from jaxshare.serving.inputs import MOST_LOGPROBS
from jaxshare.serving.scoring import TextScore, score

_MOST_TOKENS = 2**20
_MOST_CANDIDATES = 4096

router = APIRouter()

Tokens = Annotated[list[Token], Field(max_length=_MOST_TOKENS)]


class TokenizeFields(Body):
    """The body of POST /tokenize: a prompt, or messages."""

    REFUSED: ClassVar = {
        "continue_final_message": "an answer starts with a turn of its own",
        "chat_template": "the template is the checkpoint's",
    }
    LEFT_OUT: ClassVar = Body.LEFT_OUT | {"add_generation_prompt"}

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[OfferedTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class DetokenizeFields(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Tokens


class ScoreFields(Body):
    """The body of POST /v1/score."""

    model: str | None = None
    prefix: str | Tokens = ""
    candidates: Annotated[list[str | Tokens], Field(min_length=1, max_length=_MOST_CANDIDATES)]
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0


@router.post("/tokenize", tags=["tokens"])
async def tokenize(body: TokenizeFields, request: Request) -> Response:
    """Encodes a prompt, or messages up to the start of the answer."""
    service = service_of(request)
    body.check_fields()
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give one of prompt and messages", "prompt")
    tokens = await whole_tokens(service, body)
    made: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": service.engine.max_request_tokens,
        "tokens": tokens,
    }
    if body.return_token_strs:
        made["token_strs"] = [service.token_texts.text(token) for token in tokens]
    return json_response(made)


async def whole_tokens(service: Service, body: TokenizeFields) -> list[int]:
    """Returns the tokens of a prompt or of messages.

    Raises:
      ApiError: they cannot be encoded.
    """
    if body.messages is None:
        if not body.prompt:
            return []
        encode = functools.partial(service.encode, first=body.add_special_tokens)
        return await service.in_thread(encode, body.prompt)
    messages = [message.as_dict(i) for i, message in enumerate(body.messages)]
    tools = [one.function.tool() for one in body.tools or ()]
    offer = offer_of(tools, None, None, True)
    dialogue = await read_dialogue(service, messages, offer, None, body.chat_template_kwargs)
    return dialogue.tokens


@router.post("/detokenize", tags=["tokens"])
async def detokenize(body: DetokenizeFields, request: Request) -> Response:
    """Decodes tokens, special ones among them."""
    service = service_of(request)
    body.check_fields()
    service.check_model(body.model)
    vocab = service.model.config.vocab_size
    if wrong := [token for token in body.tokens if token >= vocab]:
        raise bad_request(f"token {wrong[0]} is outside the vocabulary of {vocab}", "tokens")
    return json_response({"prompt": await service.in_thread(service.decode, body.tokens)})


@router.post("/v1/score", tags=["tokens"])
async def score_candidates(body: ScoreFields, request: Request) -> Response:
    """Computes the log-probabilities of texts that may continue a prefix."""
    service = service_of(request)
    body.check_fields()
    name = service.check_model(body.model)
    service.check_open()
    return await whole(request, _score(service, body, name))


async def _score(service: Service, body: ScoreFields, name: str) -> Response:
    prefix: Any = body.prefix
    work = functools.partial(
        score, service.model_for(name), prefix, body.candidates, top_logprobs=body.top_logprobs
    )
    scores: list[TextScore] = await service.alone(work, prompt="candidates")
    sizes = sum(len(one.tokens) for one in scores)
    return json_response(
        {
            "id": new_id("score-"),
            "object": "list",
            "model": name,
            "scores": [{"index": i, **dataclasses.asdict(one)} for i, one in enumerate(scores)],
            "usage": {"candidate_tokens": sizes},
        }
    )
