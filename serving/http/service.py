"""The service: one engine, the requests that run on it over HTTP, and its states of life."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.engine import Engine
from jaxshare.serving.grammars import GrammarError, compile_grammar
from jaxshare.serving.http.batches.file_store import FileStore
from jaxshare.serving.http.errors import ApiError, api_error, bad_request, draining, param_of
from jaxshare.serving.http.generation.fields import SamplingFields
from jaxshare.serving.http.generation.grammars import AskedGrammar
from jaxshare.serving.http.generation.logprobs import TokenTexts
from jaxshare.serving.http.generation.running import Running, Wanted, submit
from jaxshare.serving.http.generation.sampling import sampler_of, stops_of
from jaxshare.serving.http.metrics import HttpMetrics
from jaxshare.serving.http.sessions.running import RUNNING, RunningSession
from jaxshare.serving.http.sessions.saves import SavedSessions
from jaxshare.serving.http.settings import ServerSettings
from jaxshare.serving.http.sse import EventStream
from jaxshare.serving.inputs import default_sampler, encode

_SHORT_PROMPT = 1024
"""Characters or tokens that are encoded in less time than a thread takes to start on them."""
_FEW_CHOICES = 8
"""Choices that are submitted in less time."""


class Service:
    """The state that the endpoints share.

    Attributes:
      engine, settings: as given.
      tracer: of the engine, for spans of requests over HTTP; None for none.
      files: of clients, and of batches; None where the server keeps none.
      metrics: of the server.
      token_texts: of the model.
      created: the time of its start, in seconds since 1970.
      sessions, saves: of workers; the former by their identity.
      is_warm: True when the engine has compiled what requests need.
      is_draining: True when it takes no more requests.
      replica: the name of this one of several servers, which is in identities of what it holds; ""
        for a server by itself.
    """

    def __init__(self, engine: Engine, settings: ServerSettings, files: "FileStore | None" = None):
        self.engine, self.settings, self.files = engine, settings, files
        self.tracer = engine.tracer
        self.metrics, self.created = HttpMetrics(settings.model_names[0]), int(time.time())
        self.token_texts = TokenTexts(engine.model.tokenizer, engine.model.config.vocab_size)
        self.is_warm = self.is_draining = False
        self.replica = ""
        self._running: set[Running] = set()
        self._busy = 0
        self._agents: set[str] = set()
        self.sessions: dict[str, RunningSession] = {}
        self.saves = SavedSessions(settings.sessions_folder, settings.sessions_bytes)
        self._scoring = concurrent.futures.ThreadPoolExecutor(1, "jaxshare-score")

    @property
    def model(self) -> LoadedModel:
        """The engine's model, with its weights of now."""
        return self.engine.model

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the engine's adapters, which requests name as their model."""
        return tuple(each.name for each in self.engine.adapters())

    def model_for(self, name: str | None) -> LoadedModel:
        """Returns the model that a request names: the engine's, or this with an adapter."""
        return self.model.using(self.adapter_for(name))

    def adapter_for(self, name: str | None) -> str | None:
        """Returns the adapter that a request names as its model; None for the model itself."""
        return None if name is None or name in self.settings.model_names else name

    # Life.

    @property
    def num_running(self) -> int:
        """The number of requests that run."""
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        """True if nothing is computed for any client."""
        writes = any(session.status == RUNNING for session in self.sessions.values())
        return not self._running and not self._busy and not writes

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Keeps the server from ending in the midst of an answer."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    def warm_up(self) -> None:
        """Compiles what requests need.

        Raises:
          ClosedError: the engine has been shut down.
          Exception: what the compiler raises.
        """
        self.token_texts.prepare()
        self.engine.warm_up()

    def cancel_all(self) -> None:
        """Ends all requests; their clients are told that the server shuts down."""
        for running in [*self._running]:
            running.cancel()
        self._close_sessions()

    def client_gone(self) -> None:
        """Counts a client that did not wait for its answer."""
        self.metrics.gone()

    def stream(self, running: Running, events: AsyncGenerator[bytes]) -> EventStream:
        """Returns an answer of events, whose end is that of what runs for it."""
        return EventStream(
            events, self.settings.stall_seconds, on_gone=self.client_gone, on_end=running.close
        )

    # Requests.

    def check_model(self, name: str | None) -> str:
        """Returns the name of the model for an answer.

        Raises:
          ApiError: another model is asked for (404).
        """
        names = self.settings.model_names
        if name is not None and name not in (*names, *self.adapter_names):
            raise ApiError(
                404,
                f"the model {name[:256]!r} is not served here; GET /v1/models lists those that are",
                param="model",
                code="model_not_found",
            )
        return name or names[0]

    def check_open(self) -> None:
        """Raises ApiError where the server shuts down."""
        if self.is_draining:
            raise draining()

    async def in_thread[Value](
        self, work: Callable[..., Value], *args: Any, prompt: str = "prompt"
    ) -> Value:
        """Runs what takes long, such as encoding, in a thread.

        Args:
          work, args: what to call.
          prompt: the name of the field that has the prompt, for errors.

        Raises:
          ApiError: for every error of the library.
        """
        return await self._in(None, functools.partial(work, *args), prompt)

    async def _in(
        self, threads: concurrent.futures.Executor | None, work: Callable[[], Any], prompt: str
    ) -> Any:
        # What is logged or traced in the thread is of this request.
        here = contextvars.copy_context()
        with _errors_told(prompt):
            return await asyncio.get_running_loop().run_in_executor(threads, here.run, work)

    async def tokens_of(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        """Returns the tokens of prompts as `encode` does; in a thread where that takes long.

        Raises:
          ApiError: as `encode` does.
        """
        if sum(map(len, prompts)) > _SHORT_PROMPT:
            return await self.in_thread(lambda: [*map(self.encode, prompts)])
        with _errors_told("prompt"):
            return [*map(self.encode, prompts)]

    def encode(self, prompt: str | Sequence[int], *, first: bool = True) -> list[int]:
        """Returns the tokens of a prompt, checked against the vocabulary.

        Args:
          prompt: a text, or tokens.
          first: see `jaxshare.serving.inputs.encode`.

        Raises:
          ApiError: it is empty, or has other tokens.
        """
        tokens = encode(self.model, prompt, first=first)
        vocab = self.model.config.vocab_size
        if (wrong := next((token for token in tokens if token >= vocab), None)) is not None:
            raise bad_request(
                f"the prompt's token {wrong} is outside the vocabulary of {vocab}", "prompt"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens; "" without a tokenizer."""
        tokenizer: Any = self.model.tokenizer
        return "" if tokenizer is None else tokenizer.decode(tokens)

    def room(
        self, prompt: Sequence[int], asked: int | None, default: int | None, field: str = "prompt"
    ) -> int:
        """Returns the most tokens of an output.

        Args:
          prompt: its tokens.
          asked: by the client; None for the default.
          default: None for as many as fit.
          field: that has the prompt, for errors.

        Raises:
          ApiError: the prompt leaves no room, or not as much as is asked for.
        """
        most = self.engine.max_request_tokens
        left = most - len(prompt)
        if left < (asked or 1):
            wanted = f" and {asked} more may follow" if asked else ""
            raise bad_request(
                f"the prompt has {len(prompt)} tokens{wanted}, but this server takes {most} "
                "together; shorten the prompt or lower max_tokens",
                field,
                "context_length_exceeded",
            )
        return asked or min(left, default or left)

    def check_choices(self, count: int) -> None:
        """Raises ApiError where a request asks for too many completions."""
        if count > self.settings.max_choices:
            raise bad_request(
                f"the request asks for {count} completions; this server takes "
                f"{self.settings.max_choices} at most",
                "n",
            )

    def check_agent(self, name: str | None) -> None:
        """Raises ApiError where a request brings one name of an agent too many."""
        if not name or name in self._agents:
            return
        if len(self._agents) >= self.settings.max_agents:
            raise bad_request(
                f"agent_id is new, and the server has {self.settings.max_agents} agents already, "
                "the most that it takes; use one of those, or leave it out",
                "agent_id",
            )
        self._agents.add(name)

    async def start(
        self,
        fields: SamplingFields,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        max_tokens: int | None,
        default_max_tokens: int | None,
        grammar: AskedGrammar | None,
        logprobs: bool,
        top_logprobs: int,
        prompt: str = "prompt",
    ) -> Running:
        """Submits the choices of a request.

        Args:
          fields: how they are sampled.
          prompts: tokens of each.
          n: choices of each.
          max_tokens, default_max_tokens: see `room`.
          grammar: of the texts, or None.
          logprobs, top_logprobs: see `Engine.submit`.
          prompt: the name of the field that has the prompt, for errors.

        Raises:
          ApiError: it was refused.
        """
        self.check_open()
        self.check_choices(n * len(prompts))
        self.check_agent(fields.agent_id)
        room = [self.room(each, max_tokens, default_max_tokens, prompt) for each in prompts]

        def submit_all() -> Running:
            wanted = Wanted(
                prompts,
                n,
                self._sampler(fields, grammar),
                room,
                stops_of(fields),
                fields.include_stop_str_in_output,
                fields.seed,
                fields.agent_id,
                fields.priority,
                fields.resample,
                logprobs,
                top_logprobs,
                self.adapter_for(fields.model),
            )
            return Running(submit(self.engine, wanted), self._running.discard)

        # Where the engine is busy, every change of threads waits for the interpreter's lock.
        if grammar is None and n * len(prompts) <= _FEW_CHOICES:
            with _errors_told(prompt):
                running = submit_all()
        else:
            running = await self.in_thread(submit_all, prompt=prompt)
        self._running.add(running)
        running.expire_after(self.settings.request_seconds)
        return running

    def _sampler(self, fields: SamplingFields, asked: AskedGrammar | None) -> Sampler:
        """The sampler of a request.

        Raises:
          ApiError: its grammar does not compile, with the field that asks for it.
          ValueError, TypeError: see `sampler_of`.
        """
        grammar = asked and asked.grammar
        made = sampler_of(fields, default_sampler(self.model), self.model.tokenizer, grammar)
        try:
            compile_grammar(self.model, made)  # the engine finds it compiled
        except GrammarError as error:
            assert asked is not None
            field = param_of(str(error), asked.field)
            raise bad_request(str(error), field, "invalid_value") from None
        return made

    async def alone[Value](self, work: Callable[[], Value], *, prompt: str = "prompt") -> Value:
        """Runs a scoring of texts as `in_thread`; one at a time, since each takes memory."""
        return await self._in(self._scoring, work, prompt)

    def close(self) -> None:
        """Frees the thread of scorings, and ends sessions."""
        self._scoring.shutdown(wait=False, cancel_futures=True)
        self._close_sessions()

    def _close_sessions(self) -> None:
        for session in [*self.sessions.values()]:
            session.close(wait=False)


@contextlib.contextmanager
def _errors_told(prompt: str) -> Iterator[None]:
    """Turns errors of the library into what the client is told.

    Args:
      prompt: the name of the field that has the prompt.
    """
    try:
        yield
    except Exception as error:
        told = api_error(error, prompt=prompt)
        if told.status == 500:
            raise
        raise told from error
