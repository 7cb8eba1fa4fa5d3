"""PyTorch's side of bench_attention.py, run by a Python that has PyTorch with CUDA. One JSON object
a line, in on stdin, out on stdout.

    (at the start)                       -> versions
    {"do": "prepare", "rows": R, "heads": H, "kv_heads": K, "head_dim": D, "tokens": S, "layers": L, "calls": N}
                                         -> way: how scaled_dot_product_attention is fastest over such random keys and values; reasons: why
                                            other ways cannot be taken
    {"do": "attend", "passes": P}        -> seconds of P times N calls, in that way

Each row has keys and values of its own and one query a head. Ways differ in the kernel, and in
whether the G queries of a kv head are heads (enable_gqa) or stand side by side like tokens, which
is the same without a mask. N calls are captured as a CUDA graph, so that the host's part of a
launch does not count. Every answer has `idle_seconds` and `idle_cpu_seconds` of the wait for the
request; what cannot be done is answered with {"error": SENTENCE}.
"""

import itertools
import platform
import time
from collections.abc import Callable
from typing import Any

from scripts.bench.peers.conversation import Conversation

KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
TRIALS = 3


class Session:
    """The keys and values of all layers, and the captured calls."""

    def __init__(self, torch: Any):
        self.torch = torch
        self.graph = self.made = None

    def prepare(
        self,
        rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        tokens: int,
        layers: int,
        calls: int,
    ) -> dict[str, Any]:
        torch = self.torch
        self.graph = self.made = None
        torch.cuda.empty_cache()
        shape = rows, kv_heads, tokens, head_dim
        arenas = [
            [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
            for _ in range(layers)
        ]
        query = torch.randn(rows, heads, 1, head_dim, device="cuda", dtype=torch.bfloat16)
        side_by_side = query.view(rows, kv_heads, heads // kv_heads, head_dim)
        seconds, graphs, reasons = {}, {}, {}
        for kernel, (form, q) in itertools.product(
            KERNELS, {"grouped heads": query, "side by side": side_by_side}.items()
        ):
            way = f"{kernel}, {form}"
            try:
                graphs[way] = self._captured(kernel, q, arenas, calls)
                seconds[way] = min(self._run(graphs[way][0], 1) for _ in range(TRIALS))
            except Exception as error:  # a kernel that cannot serve raises whatever it likes
                reasons[way] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        if not seconds:
            raise RuntimeError("; ".join(f"{way}: {why}" for way, why in reasons.items()))
        best = min(seconds, key=seconds.__getitem__)
        self.graph, self.made = graphs[best]
        return {"way": best, "seconds_of_ways": seconds, "reasons": reasons}

    def attend(self, passes: int) -> dict[str, Any]:
        return {"seconds": self._run(self.graph, passes)}

    def _captured(self, kernel: str, q: Any, arenas: list[Any], calls: int) -> tuple[Any, Any]:
        """A graph of `calls` calls, through all layers in turn; and the tensors that it holds on
        to."""
        torch = self.torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def attend(i: int) -> Any:
            keys, values = arenas[i % len(arenas)]
            return torch.nn.functional.scaled_dot_product_attention(
                q, keys, values, enable_gqa=q.shape[1] != keys.shape[1]
            )

        with sdpa_kernel([getattr(SDPBackend, kernel)]):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                attend(0)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(calls):
                    out = attend(i)
        return graph, (q, arenas, out)

    def _run(self, graph: Any, passes: int) -> float:
        self.torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(passes):
            graph.replay()
        self.torch.cuda.synchronize()
        return time.perf_counter() - begin


def main(make: Callable[[Any], Any]) -> None:
    """Answers requests by the methods, of their names, of what `make` makes of the module torch."""
    conversation = Conversation()
    try:
        import torch
    except ImportError as error:
        return conversation.say(error=str(error))
    if not torch.cuda.is_available():
        return conversation.say(error=f"PyTorch {torch.__version__} finds no CUDA device")
    conversation.say(
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }
    )
    session = make(torch)
    with torch.inference_mode():
        conversation.answer_requests(session)


if __name__ == "__main__":
    main(Session)
