"""transformers' side of bench_decode.py, run by a Python that has PyTorch. One JSON object a line,
in on stdin, out on stdout.

    (at the start)                                 -> versions
    {"do": "load", "folder": PATH, "threads": N, "dtype": NAME, "device": NAME}
                                                   -> threads; by default bfloat16, on the CPU
    {"do": "prefill", "tokens": [[...], ...], "copies": N}
                                                   -> seconds; tokens and near, as for trace, of the prompts' ends; N rows hold
                                                      a copy each of what was computed of a prompt (default 1)
    {"do": "trace", "steps": N}                    -> tokens [N][R] and near [N][R]: by how many spacings of the logits' dtype each token
                                                      beat the second best
    {"do": "step", "steps": N}                     -> seconds

Every answer has `idle_seconds`, between the answer before and the request, and the CPU time that
this process took in them, `idle_cpu_seconds`. What cannot be done is answered with {"error":
SENTENCE}.
"""

import platform
import time
from typing import Any

from scripts.bench.peers.conversation import Conversation


class Session:
    """The model, and the batch that is being decoded."""

    def load(
        self, folder: str, threads: int, dtype: str = "bfloat16", device: str = "cpu"
    ) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.model = (
            transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
            )
            .eval()
            .to(device)
        )
        self.prefill([[0] * 64])  # what is set up at the first use is not to be measured
        self.step(2)
        return {"threads": torch.get_num_threads()}

    def prefill(self, tokens: list[list[int]], copies: int = 1) -> dict[str, Any]:
        import torch
        from transformers import DynamicCache

        self.cache = None  # the last batch's memory is free before this one's is asked for
        ids = torch.tensor(tokens, device=self.model.device)
        begin = time.perf_counter()
        self.cache = DynamicCache(config=self.model.config)
        logits = self.feed(ids)
        if copies > 1:
            logits = logits.repeat_interleave(copies, dim=0)
            self.cache.batch_repeat_interleave(copies)
        self.token = logits.argmax(-1, keepdim=True)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "tokens": self.token[:, 0].tolist(), "near": _near(logits)}

    def step(self, steps: int) -> dict[str, Any]:
        begin = time.perf_counter()
        for _ in range(steps):
            self.token = self.feed(self.token).argmax(-1, keepdim=True)
        self.token.tolist()  # a GPU has done all of it then
        return {"seconds": time.perf_counter() - begin}

    def trace(self, steps: int) -> dict[str, Any]:
        tokens, near = [], []
        for _ in range(steps):
            logits = self.feed(self.token)
            self.token = logits.argmax(-1, keepdim=True)
            tokens.append(self.token[:, 0].tolist())
            near.append(_near(logits))
        return {"tokens": tokens, "near": near}

    def feed(self, ids: Any) -> Any:
        """int64[R, T] -> the logits [R, V] after each row's last token."""
        return self.model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]


def _near(logits: Any) -> list[float]:
    import torch

    best, second = logits.float().topk(2, dim=-1).values.unbind(-1)
    spacing = torch.finfo(logits.dtype).eps * torch.exp2(best.abs().log2().floor())
    return ((best - second) / spacing).tolist()


def main(session: Any) -> None:
    """Answers requests by the methods of `session` that have their names."""
    conversation = Conversation()
    try:
        import torch
        import transformers
    except ImportError as error:
        return conversation.say(error=str(error))
    conversation.say(
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    )
    with torch.inference_mode():
        conversation.answer_requests(session)


if __name__ == "__main__":
    main(Session())
