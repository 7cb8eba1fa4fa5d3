"""The sides of vLLM and SGLang in `scripts.papers.hydragen throughput`, run by a Python that has the
one that $HYDRAGEN_ENGINE names. One JSON object a line, in on stdin, out on stdout.

    (at the start)                                     -> versions
    {"do": "load", "folder": PATH, "dtype": NAME, "tensor": N, "positions": P, "rows": R, "seed": S}
                                                       -> nothing; at most R rows of P tokens
    {"do": "turn", "prompt": [...], "rows": R, "tokens": N, "text": BOOL}
                                                       -> seconds of the passes after the first, `first_seconds` up to the first token;
                                                          R completions of N tokens of one prompt, with their texts or without

The time of N tokens less that of one is the time of decoding alone, as in appendix D.1. The rest is
as in `scripts.bench.peers.torch_decode`.
"""

import importlib.metadata
import os
import platform
import time
from typing import Any

from scripts.bench.peers.conversation import Conversation

ENGINE = "HYDRAGEN_ENGINE"
"""The variable that names the engine."""
VLLM, SGLANG = "vllm", "sglang"


class VllmSession:
    """vLLM's offline engine, which keeps common prefixes once and reads them for every row."""

    def load(
        self, folder: str, dtype: str, tensor: int, positions: int, rows: int, seed: int
    ) -> dict[str, Any]:
        import vllm  # pyright: ignore[reportMissingImports]

        self._params = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=folder,
            dtype=dtype,
            tensor_parallel_size=tensor,
            max_model_len=positions,
            max_num_seqs=rows,
            enable_prefix_caching=True,
            seed=seed,
        )
        return {}

    def turn(self, prompt: list[int], rows: int, tokens: int, text: bool) -> dict[str, Any]:
        def generate(count: int) -> list[int]:
            how = {"max_tokens": count, "ignore_eos": True, "detokenize": text}
            params = self._params(temperature=1.0, **how)
            asked = [{"prompt_token_ids": prompt} for _ in range(rows)]
            found = self._engine.generate(asked, params, use_tqdm=False)
            return [len(each.outputs[0].token_ids) for each in found]

        return _decoding(generate, rows, tokens)


class SglangSession:
    """SGLang's offline engine, which keeps common prefixes once (RadixAttention)."""

    def load(
        self, folder: str, dtype: str, tensor: int, positions: int, rows: int, seed: int
    ) -> dict[str, Any]:
        import sglang  # pyright: ignore[reportMissingImports]

        self._engine = sglang.Engine(
            model_path=folder,
            dtype=dtype,
            tp_size=tensor,
            context_length=positions,
            max_running_requests=rows,
            random_seed=seed,
        )
        return {}

    def turn(self, prompt: list[int], rows: int, tokens: int, text: bool) -> dict[str, Any]:
        def generate(count: int) -> list[int]:
            params = {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True}
            found = self._engine.generate(input_ids=[prompt] * rows, sampling_params=params)
            return [each["meta_info"]["completion_tokens"] for each in found]

        return _decoding(generate, rows, tokens)


def _decoding(generate: Any, rows: int, tokens: int) -> dict[str, Any]:
    """The seconds of `tokens` a row less those of the first one.

    Raises:
      RuntimeError: fewer tokens were made than were asked for.
    """
    seconds = []
    for count in (1, tokens):
        begin = time.perf_counter()
        made = generate(count)
        seconds.append(time.perf_counter() - begin)
        if made != [count] * rows:
            raise RuntimeError(f"{sum(made)} tokens were made in place of {rows} times {count}")
    return {"seconds": seconds[1] - seconds[0], "first_seconds": seconds[0]}


def main() -> None:
    conversation, engine = Conversation(), os.environ[ENGINE]
    try:
        version = importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return conversation.say(error=f"the package {engine} is not installed")
    conversation.say(versions={"python": platform.python_version(), engine: version})
    conversation.answer_requests(VllmSession() if engine == VLLM else SglangSession())


if __name__ == "__main__":
    main()
