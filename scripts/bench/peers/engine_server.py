"""An engine of jaxshare in a process of its own, which answers itself or over HTTP. One JSON object
a line, in on stdin, out on stdout.

    (at the start)                                      -> versions
    {"do": "load", "model": NAME}                       -> nothing
    {"do": "open", "rows": R, "tokens": N, "listen": BOOL}
                                                        -> port (0 if it does not listen): an engine of R rows of N tokens, warm
    {"do": "run", "requests": [...]}                    -> seconds; tokens, first (seconds to the first token), texts of each request,
                                                           submitted all at once

The rest is as in `torch_decode`.
"""

import gc
import importlib.metadata
import platform
import threading
import time
from typing import Any

from jaxshare import SamplingParams
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.engine import Engine
from jaxshare.serving.http.server import DrainingServer, listen
from jaxshare.serving.http.service import Service
from jaxshare.serving.http.settings import ServerSettings
from scripts.bench.parts.serve.loads import TEMPERATURE, Request, load_model
from scripts.bench.peers.conversation import Conversation

_SAMPLER = SamplingParams(TEMPERATURE, ignore_eos=True)


class EngineServer:
    """The engine, and the server before it."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._server: DrainingServer | None = None
        self._thread: threading.Thread | None = None

    def load(self, model: str) -> dict[str, Any]:
        self._close()
        self._model = load_model(model)
        return {}

    def open(self, rows: int, tokens: int, listen: bool) -> dict[str, Any]:
        self._close()
        size = _bytes_per_token(self._model) * rows * tokens
        self._engine = Engine(self._model, max_rows=rows, kv_bytes=2 * size)
        self._engine.warm_up()
        gc.collect()
        gc.freeze()  # as the command does
        return {"port": self._listen(self._engine) if listen else 0}

    def run(self, requests: list[Request]) -> dict[str, Any]:
        assert self._engine is not None
        begin = time.perf_counter()
        streams = [
            self._engine.submit(
                request["prompt"],
                _SAMPLER,
                max_new_tokens=request["max_tokens"],
                seed=stream_seed(request["seed"], 0, 0),
            )
            for request in requests
        ]
        done = [stream.wait() for stream in streams]
        return {
            "seconds": time.perf_counter() - begin,
            "tokens": [len(each.tokens) for each in done],
            "first": [each.first_token_seconds for each in done],
            "texts": [each.text for each in done],
        }

    def _listen(self, engine: Engine) -> int:
        listening = listen("127.0.0.1", 0)
        service = Service(engine, ServerSettings(model_names=("bench",)))
        self._server = DrainingServer(service, listening)
        started = threading.Event()
        self._server.on_start = started.set
        self._thread = threading.Thread(
            target=self._server.serve_until_told, kwargs={"warm_up": False}, daemon=True
        )
        self._thread.start()
        if not started.wait(60):
            raise RuntimeError("the server has not started within 60 seconds")
        return listening.getsockname()[1]

    def _close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.drain()
            self._thread.join()
            self._server = self._thread = None
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
        gc.unfreeze()


def _bytes_per_token(model: LoadedModel) -> int:
    config = model.config
    return 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim


def main() -> None:
    """Answers requests until there are no more."""
    conversation = Conversation()
    packages = ("jax", "starlette", "uvicorn")
    versions = {name: importlib.metadata.version(name) for name in packages}
    conversation.say(versions={"python": platform.python_version(), **versions})
    conversation.answer_requests(EngineServer())


if __name__ == "__main__":
    main()
