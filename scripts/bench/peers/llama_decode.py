"""llama.cpp's side of the benchmark against it, run by a Python that has llama-cpp-python and gguf.
One JSON object a line, in on stdin, out on stdout.

    (at the start)                                  -> versions
    {"do": "load", "folder": PATH, "threads": N}    -> system: what llama.cpp was compiled for; "kind": "Q8_0", say, quantises, and
                                                       "file": PATH is written, or read if it is there, and
                                                       "extra": false does without the forms of weights for this machine's matrix unit
    {"do": "open", "rows": R, "tokens": N, "flash": BOOL, "unified": BOOL}
                                                    -> nothing: room for R sequences of N tokens
    {"do": "prefill", "tokens": [[...], ...], "share": BOOL}
                                                    -> seconds; tokens [R], the likeliest next ones. With `share` the first prompt is all
                                                       rows' prompt, and each row feeds its own first token after it
    {"do": "trace", "steps": N}                     -> tokens [N][R]
    {"do": "step", "steps": N}                      -> seconds; tokens are fed as they come, and not chosen

The rest is as in `torch_decode`.
"""

import ctypes
import importlib.metadata
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.bench.peers.conversation import Conversation
from scripts.bench.peers.llama_weights import write

_BATCH = 2048
"""Tokens of a call, as llama.cpp's own programs have it."""


class LlamaSession:
    """The model, and the batch that is being decoded."""

    def load(
        self, folder: str, threads: int, kind: str = "", file: str | None = None, extra: bool = True
    ) -> dict[str, Any]:
        import llama_cpp

        self._c, self._threads, self._context = llama_cpp, threads, None
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(file or Path(temporary) / "model.gguf")
            if not place.exists():
                partial = place.with_suffix(".partial")
                write(Path(folder), partial, kind)
                partial.rename(place)
            parameters = llama_cpp.llama_model_default_params()
            parameters.use_extra_bufts = extra
            self._model = llama_cpp.llama_model_load_from_file(bytes(place), parameters)
        if not self._model:
            raise RuntimeError("llama.cpp did not load the model")
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        return {"system": llama_cpp.llama_print_system_info().decode().strip()}

    def open(self, rows: int, tokens: int, flash: bool, unified: bool) -> dict[str, Any]:
        c = self._c
        if self._context is not None:
            c.llama_free(self._context)
        parameters = c.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = rows * tokens, rows
        parameters.n_batch, parameters.n_ubatch = _BATCH, 512
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.flash_attn_type = (
            c.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else c.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        parameters.kv_unified, parameters.no_perf = unified, True
        self._context = c.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._memory = c.llama_get_memory(self._context)
        return {}

    def prefill(self, tokens: list[list[int]], share: bool = False) -> dict[str, Any]:
        rows = range(len(tokens))
        self._c.llama_memory_clear(self._memory, True)
        self._length = len(tokens[0])
        begin = time.perf_counter()
        if share:
            self._feed(
                [(0, t, token) for t, token in enumerate(tokens[0])], last={self._length - 1}
            )
            for row in rows[1:]:
                self._c.llama_memory_seq_cp(self._memory, 0, row, -1, -1)
            self._tokens = [prompt[0] for prompt in tokens]
            return {"seconds": time.perf_counter() - begin, "tokens": self._tokens}
        todo = [(row, t, tokens[row][t]) for row in rows for t in range(self._length)]
        chosen = []
        for at in range(0, len(todo), _BATCH):
            part = todo[at : at + _BATCH]
            chosen += self._feed(part, last={self._length - 1})
        self._tokens = chosen
        return {"seconds": time.perf_counter() - begin, "tokens": chosen}

    def trace(self, steps: int) -> dict[str, Any]:
        found = []
        for _ in range(steps):
            self._tokens = self._feed(self._next())
            found.append(self._tokens)
        return {"tokens": found}

    def step(self, steps: int) -> dict[str, Any]:
        begin = time.perf_counter()
        for _ in range(steps):
            self._run(self._next())
        return {"seconds": time.perf_counter() - begin}

    def _next(self) -> list[tuple[int, int, int]]:
        self._length += 1
        return [(row, self._length - 1, token) for row, token in enumerate(self._tokens)]

    def _run(self, todo: list[tuple[int, int, int]], last: set[int] | None = None) -> None:
        """Feeds (row, position, token)s; logits are computed at positions in `last`, or at all."""
        batch = self._batch
        batch.n_tokens = len(todo)
        for i, (row, position, token) in enumerate(todo):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.logits[i] = last is None or position in last
        code = self._c.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code} for {len(todo)} tokens")

    def _feed(self, todo: list[tuple[int, int, int]], last: set[int] | None = None) -> list[int]:
        """Feeds tokens as `_run` does; returns the likeliest one at each of these positions."""
        import numpy as np

        self._run(todo, last)
        chosen = []
        for i, (_, position, _) in enumerate(todo):
            if last is None or position in last:
                logits = self._c.llama_get_logits_ith(self._context, i)
                array = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._vocab)).contents
                chosen.append(int(np.frombuffer(array, np.float32).argmax()))
        return chosen


def main() -> None:
    """Answers requests until there are no more."""
    conversation = Conversation()
    try:
        import gguf  # noqa: F401
        import llama_cpp
    except ImportError as error:
        return conversation.say(error=str(error))
    versions = {
        "python": platform.python_version(),
        "llama-cpp-python": llama_cpp.__version__,
        "gguf": importlib.metadata.version("gguf"),
    }
    conversation.say(versions=versions)
    return conversation.answer_requests(LlamaSession())


if __name__ == "__main__":
    main()
