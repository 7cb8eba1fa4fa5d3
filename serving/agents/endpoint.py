"""A model behind an HTTP endpoint that speaks OpenAI's protocol for chats, as agents' model."""

import asyncio
import dataclasses
import json
import re
import urllib.parse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from jaxshare import Grammar
from jaxshare.argument_checks import INT64_MAX, as_float, as_integer, shown
from jaxshare.extras import MissingExtraError
from jaxshare.serving.agents.errors import AgentError
from jaxshare.serving.agents.loop_thread import LoopThread
from jaxshare.serving.agents.requests import ModelCall, Options, Reply
from jaxshare.serving.agents.streaming import Tell
from jaxshare.serving.chat import BrokenCall, ToolCall

if TYPE_CHECKING:
    import openai

_DETAILS = 300
"""Characters of an endpoint's error that are shown."""
_GUIDED = {"regex": "regex", "choices": "choice", "lark": "grammar"}
"""The fields of vLLM's `structured_outputs` by kinds of grammars that OpenAI's fields do not have."""


class EndpointError(AgentError):
    """An endpoint cannot be reached, refuses, or gives something that is no answer."""


class OpenAIModel:
    """A model at any endpoint with OpenAI's POST /v1/chat/completions, such as `jaxshare serve`.

        model = OpenAIModel("qwen", base_url="http://localhost:8000/v1")
        print(run(solve, "What is 2 + 2?", model=model))

    A call has the same seed as with an `EngineModel`, so an endpoint that keeps to seeds gives the
    same answers again. Connections are kept from one run to the next; `close`, or a `with` block,
    ends them. Takes the package `openai`: pip install 'jaxshare[openai]'.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str,
        api_key: str | None = None,
        defaults: Options | None = None,
        timeout: float = 600.0,
        retries: int = 4,
        most_calls: int = 64,
        seed_bits: int = 63,
        limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
        sends_grammars: bool = True,
        extra_body: Mapping[str, Any] | None = None,
    ):
        """Makes a model; nothing is sent yet.

        Args:
          model: its name at the endpoint.
          base_url: of the interface, such as http://localhost:8000/v1.
          api_key: sent to this address alone; None where the endpoint takes none.
          defaults: for the options that a call leaves open; the endpoint's own beyond these.
          timeout: seconds for one answer, with all its attempts.
          retries: further attempts where the endpoint cannot be reached, is too busy (429) or fails
            (408, 409, 5xx), after as long as it says, or after 0.5 s, 1 s, and so on up to 8 s.
          most_calls: answers under way at once; further calls wait, which is no part of `timeout`.
          seed_bits: seeds are sent modulo 2**seed_bits; some endpoints take 32 bits or fewer.
          limit_field: the name of the field of `max_new_tokens`.
          sends_grammars: False for an endpoint that cannot constrain answers, or not to the schema
            of some type: answers are checked anyway.
          extra_body: further fields of every request.

        Raises:
          ValueError, TypeError: an argument out of range; an address that is none; a key that no
            header can carry.
          ImportError: openai is not installed.
        """
        _package()
        if not isinstance(model, str) or not model:
            raise ValueError(f"model is {shown(model)}; give the name that the endpoint has for it")
        if limit_field not in ("max_tokens", "max_completion_tokens"):
            raise ValueError(
                f"limit_field is {shown(limit_field)}; it must be max_tokens or "
                "max_completion_tokens"
            )
        self.model, self.base_url = model, _checked_url(base_url)
        self._key = _checked_key(api_key)
        self._defaults, self._extra = defaults or Options(), dict(extra_body or {})
        self._timeout = as_float("timeout", timeout)
        if self._timeout <= 0:
            raise ValueError(f"timeout is {shown(timeout)}; it must be above 0")
        self._retries = as_integer("retries", retries, 0, 1000)
        self._most_calls = as_integer("most_calls", most_calls, 1)
        self._seeds = min(1 << as_integer("seed_bits", seed_bits, 1, 63), INT64_MAX + 1)
        self._limit_field, self._sends_grammars = limit_field, sends_grammars
        self._thread = LoopThread("jaxshare-endpoint")
        # Of the thread's loop: the client, and what bounds the calls under way.
        self._opened: tuple[openai.AsyncOpenAI, asyncio.Semaphore] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "OpenAIModel":
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; another call opens new ones."""
        self._thread.close()
        self._opened = None

    async def answer(self, call: ModelCall) -> Reply:
        """Answers one call; see `Model`.

        Raises:
          EndpointError: the endpoint cannot be reached, refuses or does not answer in the form of
            the protocol, after all attempts that may help.
          TimeoutError: it has not answered in time.
        """
        return await self._thread.call(self._answer(call, None))

    async def stream(self, call: ModelCall, tell: Tell) -> Reply:
        """Answers one call in pieces; see `StreamingModel`. Errors as of `answer`."""
        loop = asyncio.get_running_loop()

        def tell_there(text: str, is_reasoning: bool) -> None:
            loop.call_soon_threadsafe(tell, text, is_reasoning)

        return await self._thread.call(self._answer(call, tell_there))

    async def _answer(self, call: ModelCall, tell: Tell | None) -> Reply:
        """Answers in the thread's loop."""
        openai = _package()
        client, slots = self._open()
        async with slots:
            try:
                async with asyncio.timeout(self._timeout):
                    written = await self._written(client, call, tell)
            except (openai.APITimeoutError, TimeoutError):
                raise TimeoutError(
                    f"the endpoint {self.base_url} has not answered within {self._timeout:g} "
                    "seconds; see to it, or give a longer timeout"
                ) from None
            except openai.APIConnectionError as error:
                raise self._unreachable(error) from error
            except openai.APIStatusError as error:
                raise self._refused(error.status_code, error.response.text) from error
            except openai.OpenAIError as error:  # such as an error in the midst of a stream
                raise EndpointError(
                    f"the endpoint {self.base_url} has failed: {self._told(str(error))}"
                ) from error
        return _reply(written, call)

    async def _written(
        self, client: "openai.AsyncOpenAI", call: ModelCall, tell: Tell | None
    ) -> "_Written":
        given: dict[str, Any] = self._request(call)
        written = _Written()
        try:
            if tell is None:
                written.take_answer(await client.chat.completions.create(**given))
                return written
            pieces: Any = await client.chat.completions.create(
                **given, stream=True, stream_options={"include_usage": True}
            )
            async with pieces:
                await self._take_pieces(pieces, written, tell)
        except (AttributeError, TypeError, LookupError, ValueError) as error:
            raise self._no_answer() from error
        if not written.finish_reason:
            raise self._no_answer()
        return written

    async def _take_pieces(self, pieces: Any, written: "_Written", tell: Tell) -> None:
        openai = _package()
        try:
            async for piece in pieces:
                written.take_piece(piece, tell)
        except openai.APITimeoutError:
            raise
        except openai.APIConnectionError as error:
            reason = error.__cause__ or error
            raise EndpointError(
                f"the endpoint {self.base_url} broke off in its answer "
                f"({type(reason).__name__}: {self._told(str(reason))}); see to it, or give llm some "
                "retries"
            ) from error

    def _open(self) -> "tuple[openai.AsyncOpenAI, asyncio.Semaphore]":
        if self._opened is None:
            client = _package().AsyncOpenAI(
                base_url=self.base_url,
                api_key=self._key or "none",
                timeout=self._timeout,
                max_retries=self._retries,
            )
            self._thread.at_end.append(client.close)
            self._opened = client, asyncio.Semaphore(self._most_calls)
        return self._opened

    def _request(self, call: ModelCall) -> dict[str, Any]:
        """The arguments of the client's method for one call."""
        options = {
            field.name: getattr(self._defaults, field.name) if value in (None, ()) else value
            for field in dataclasses.fields(Options)
            for value in (getattr(call.options, field.name),)
        }
        extra = {**self._extra}
        extra |= {name: options[name] for name in ("top_k", "min_p") if options[name] is not None}
        if call.chat_template_kwargs:
            extra["chat_template_kwargs"] = dict(call.chat_template_kwargs)
        given: dict[str, Any] = {
            "model": options["adapter"] or self.model,
            "messages": [_as_sent(message.as_dict()) for message in call.messages],
            "seed": call.seed % self._seeds,
            "temperature": options["temperature"],
            "top_p": options["top_p"],
            "stop": [*options["stop"]] or None,
            self._limit_field: options["max_new_tokens"],
            "tools": [tool.schema() for tool in call.tools] or None,
        }
        if call.grammar and self._sends_grammars:
            _add_grammar(call.grammar, given, extra)
        given = {name: value for name, value in given.items() if value is not None}
        return given | ({"extra_body": extra} if extra else {})

    def _unreachable(self, error: Exception) -> EndpointError:
        reason = error.__cause__ or error
        attempts = f" in {self._retries + 1} attempts" if self._retries else ""
        return EndpointError(
            f"the endpoint {self.base_url} cannot be reached{attempts} "
            f"({type(reason).__name__}: {self._told(str(reason))}); start it, or give another "
            "base_url"
        )

    def _refused(self, status: int, body: str) -> EndpointError:
        remedies = {
            401: "give the right api_key",
            403: "give an api_key that may do this",
            404: f"give another base_url, or another model than {self.model}",
            429: "give fewer most_calls, or more retries",
        }
        remedy = remedies.get(status, "change the request" if status < 500 else "see to it")
        return EndpointError(
            f"the endpoint {self.base_url} {'refuses' if status < 500 else 'fails'} (HTTP {status}: "
            f"{self._told(body)}); {remedy}"
        )

    def _no_answer(self) -> EndpointError:
        return EndpointError(
            f"the endpoint {self.base_url} gives what is no chat completion, or a part of one; give "
            "the address of an interface like OpenAI's, which mostly ends in /v1"
        )

    def _told(self, text: str) -> str:
        """Some words of the endpoint's, on one line, without the key."""
        text = " ".join((text.replace(self._key, "[the key]") if self._key else text).split())
        return text if len(text) <= _DETAILS else f"{text[: _DETAILS - 3]}..."


def _package() -> Any:
    try:
        import openai  # here, because it takes half a second and is optional
    except ImportError:
        raise MissingExtraError(
            "OpenAIModel takes the package openai, which is not installed", "openai"
        ) from None
    return openai


def _checked_url(url: Any) -> str:
    parts = urllib.parse.urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"base_url is {shown(url)}; it must be an address such as http://localhost:8000/v1"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        # Errors show the address, so none of it may be a secret.
        raise ValueError(
            f"base_url, at {parts.hostname}, has a user, a query or a fragment; leave them out, and "
            "give a key as api_key"
        )
    return url.rstrip("/")


def _checked_key(key: Any) -> str | None:
    if key is None or (isinstance(key, str) and re.fullmatch(r"[!-~]+", key)):
        return key
    raise ValueError(
        "api_key is no text, or has spaces, line breaks or characters outside ASCII, which no header "
        "can carry; give the key alone"
    )


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's form, in which the arguments of calls are JSON texts."""
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(
            call["function"]["arguments"], ensure_ascii=False
        )
    return message


def _add_grammar(grammar: Grammar, given: dict[str, Any], extra: dict[str, Any]) -> None:
    if grammar.kind == "json_schema":
        schema = {"name": "answer", "schema": json.loads(grammar.source), "strict": True}
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
        return
    source = json.loads(grammar.source) if grammar.kind == "choices" else grammar.source
    extra["structured_outputs"] = {_GUIDED[grammar.kind]: source}


@dataclasses.dataclass
class _Written:
    """The parts of an answer as the endpoint has written them, whole or in pieces."""

    content: str = ""
    reasoning: str | None = None
    calls: list[list[str]] = dataclasses.field(default_factory=list)
    finish_reason: str = ""
    new_tokens: int = 0
    prompt_tokens: int = 0

    def take_answer(self, answer: Any) -> None:
        """Takes a whole answer; an error of any kind where it is none."""
        choice = answer.choices[0]
        self._take_message(choice.message, lambda text, is_reasoning: None)
        self.finish_reason = choice.finish_reason or "stop"
        self._take_usage(answer.usage)

    def take_piece(self, piece: Any, tell: Tell) -> None:
        """Takes a piece of a streamed answer; an error of any kind where it is none."""
        self._take_usage(piece.usage)
        if piece.choices:
            choice = piece.choices[0]
            self._take_message(choice.delta, tell)
            self.finish_reason = choice.finish_reason or self.finish_reason

    def _take_message(self, message: Any, tell: Callable[[str, bool], None]) -> None:
        # DeepSeek, vLLM and jaxshare say reasoning_content, others reasoning.
        more = message.model_extra or {}
        reasoning = more.get("reasoning_content") or more.get("reasoning")
        if reasoning:
            self.reasoning = (self.reasoning or "") + reasoning
            tell(reasoning, True)
        if content := message.content or message.refusal:
            self.content += content
            tell(content, False)
        for number, call in enumerate(message.tool_calls or ()):
            index = getattr(call, "index", number)
            if index == len(self.calls):
                self.calls.append(["", ""])
            self.calls[index][0] += call.function.name or ""
            self.calls[index][1] += call.function.arguments or ""

    def _take_usage(self, usage: Any) -> None:
        if usage is not None:
            self.new_tokens = usage.completion_tokens or 0
            self.prompt_tokens = usage.prompt_tokens or 0


def _reply(written: _Written, call: ModelCall) -> Reply:
    """The reply of an answer, whose calls are checked against the tools that were offered."""
    offered = {tool.name: tool for tool in call.tools}
    calls: list[ToolCall] = []
    broken: list[BrokenCall] = []
    for name, given in written.calls:
        try:
            if name not in offered:
                raise ValueError(f"there is no tool {shown(name)}")
            arguments = json.loads(given or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("its arguments are no JSON object")
            offered[name].check(arguments)
            calls.append(ToolCall(name, arguments, f"call_{len(calls) + 1}"))
        except ValueError as error:
            broken.append(
                BrokenCall(f'{{"name": {json.dumps(name)}, "arguments": {given}}}', str(error))
            )
    text = "\n".join(filter(None, [written.content, *(one.text for one in broken)]))
    return Reply(
        text,
        written.new_tokens,
        written.prompt_tokens,
        written.reasoning,
        tuple(calls),
        tuple(broken),
        written.finish_reason == "length",
    )
