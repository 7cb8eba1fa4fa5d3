"""A server in a thread, and an engine that answers by a script."""

import contextlib
import dataclasses
import threading
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2

from jaxshare import FinishReason
from jaxshare.models import Generation, LoadedModel
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.stream import Detokenizer, Stream, StreamState, TokenChunk
from jaxshare.serving.http.batches.file_store import FileStore
from jaxshare.serving.http.server import DrainingServer, listen, url_of
from jaxshare.serving.http.service import Service
from jaxshare.serving.http.settings import ServerSettings
from tests.serving.chat.templates import ENDS, TEMPLATES, tokenizer


@dataclasses.dataclass
class Served:
    """A server that listens.

    Attributes:
      url: the start of its addresses.
      service, server: as they are made.
      http: a client of its own.
    """

    url: str
    service: Service
    server: DrainingServer
    http: httpx2.Client

    def post(self, path: str, body: Any, **more: Any) -> httpx2.Response:
        return self.http.post(path, json=body, **more)


@contextlib.contextmanager
def served(
    engine: Any, *, warm_up: bool = False, files: FileStore | None = None, **settings: Any
) -> Iterator[Served]:
    """Serves an engine in a thread as long as the context lasts."""
    listening = listen("127.0.0.1", 0)
    service = Service(engine, ServerSettings(**{"model_names": ("tiny",), **settings}), files)
    server = DrainingServer(service, listening)
    thread = threading.Thread(target=server.serve_until_told, kwargs={"warm_up": warm_up})
    thread.start()
    try:
        until(lambda: server.started)
        with httpx2.Client(base_url=url_of(listening), timeout=60) as http:
            yield Served(url_of(listening), service, server, http)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def until(condition: Any, seconds: float = 20) -> None:
    """Waits for a condition; fails where it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


class ScriptedEngine:
    """An engine whose answers are given, a few tokens at a time.

    Attributes:
      answers: the texts of the next requests, in turn; the last one is for all others.
      asked: the prompts and options of all requests.
      piece: tokens of a piece of a stream.
      late: seconds until an answer starts.
      warm: set when the engine may be warm.
      broken: an error that reading of every stream raises in its midst, or None.
    """

    def __init__(self, template: str = "hermes", answers: Sequence[str] = ("",)):
        words = tokenizer(TEMPLATES[template])
        config = types.SimpleNamespace(vocab_size=len(words), max_positions=4096)
        self._end = words.convert_tokens_to_ids(ENDS[template])
        self.params_version = 0
        self.model = LoadedModel(config, {}, words, Generation((self._end,)))  # pyright: ignore[reportArgumentType]
        self.metrics, self.max_request_tokens, self.tracer = Metrics(), 4096, None
        self.answers, self.piece = [*answers], 3
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        self.broken: Exception | None = None
        self.late, self.warm = 0.0, threading.Event()

    def warm_up(self) -> float:
        assert self.warm.wait(30)
        if self.broken:
            raise self.broken
        return 0.0

    def submit(self, prompt: Any, sampler: Any, **options: Any) -> Stream:
        self.asked.append(([*prompt], {"sampler": sampler, **options}))
        text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        words: Any = self.model.tokenizer
        tokens = words.encode(text, add_special_tokens=False)
        most, reason = options["max_new_tokens"], FinishReason.STOP
        if len(tokens) >= most:
            tokens, reason = tokens[:most], FinishReason.LENGTH
        state = StreamState(Detokenizer(words, options["stop"] or ()))
        logprobs = tuple(-0.5 for _ in range(len(tokens) + 1)) if options.get("logprobs") else None
        shown = tokens
        if reason is FinishReason.STOP:
            tokens = [*tokens, self._end]
        scores = logprobs and logprobs[: len(tokens)]
        logprob = scores and sum(scores)
        done = Completion("", tuple(tokens), reason, logprob, logprobs=scores)
        if self.broken:
            done = dataclasses.replace(done, finish_reason=FinishReason.ERROR, error=self.broken)
        done = dataclasses.replace(done, prompt_tokens=len(prompt))

        def answer() -> None:
            for start in range(0, len(shown), self.piece):
                part = slice(start, min(start + self.piece, len(shown)))
                state.put(TokenChunk(tuple(shown[part]), "", logprobs and logprobs[part]))
            state.finish(done)

        if self.late:
            threading.Timer(self.late, answer).start()
        else:
            answer()
        return Stream(state, lambda: None)

    @property
    def prompts(self) -> list[str]:
        """The prompts of all requests as texts."""
        words: Any = self.model.tokenizer
        return [words.decode(prompt) for prompt, _ in self.asked]


def sse_events(text: str) -> list[tuple[str | None, str]]:
    """The names and the data of server-sent events, read as the standard has it."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            fields = dict(line.split(": ", 1) for line in lines)
            found.append((fields.get("event"), fields["data"]))
    return found
