"""PyTorch's side of bench_sharing.py, run by a Python that has PyTorch. One JSON object a line, in
on stdin, out on stdout.

Speaks as torch_decode.py does, of which `load` and `step` are, and answers further:

    {"do": "fill", "rows": R, "tokens": N}          -> bytes of a cache that holds N random tokens for each row
    {"do": "turn", "steps": N}                      -> seconds of so many decode steps over it; each turn begins with the same cache
    {"do": "prepare", "rows": R, "heads": H, "kv_heads": K, "head_dim": D, "tokens": N, "device": NAME}
                                                    -> bytes of random keys and values for the attention of one layer; by default on the CPU
    {"do": "attend", "times": N}                    -> seconds of so many calls of scaled_dot_product_attention over them
    {"do": "release"}                               -> frees all of that
"""

import time
from typing import Any

from scripts.bench.peers import torch_decode as torch_decode_worker


class Session(torch_decode_worker.Session):
    """The model and a batch over it, or queries, keys and values without one."""

    def fill(self, rows: int, tokens: int) -> dict[str, Any]:
        import torch
        from transformers import DynamicCache

        self.release()
        config = self.model.config
        self.tokens, self.cache = tokens, DynamicCache(config=config)
        shape = 1, config.num_key_value_heads, tokens, config.head_dim
        for layer in range(config.num_hidden_layers):
            # Copies of one row's: the time does not depend on the numbers, and random ones are slow
            # to make.
            keys, values = (
                torch.randn(shape, dtype=self.model.dtype, device=self.model.device).repeat(
                    rows, 1, 1, 1
                )
                for _ in range(2)
            )
            self.cache.update(keys, values, layer)
        self.token = torch.ones(rows, 1, dtype=torch.int64, device=self.model.device)
        return {
            "bytes": 2
            * rows
            * config.num_hidden_layers
            * shape[1]
            * tokens
            * shape[3]
            * self.model.dtype.itemsize
        }

    def turn(self, steps: int) -> dict[str, Any]:
        if grown := self.cache.get_seq_length() - self.tokens:
            self.cache.crop(-grown)
        return self.step(steps)

    def prepare(
        self,
        rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        tokens: int,
        device: str = "cpu",
    ) -> dict[str, Any]:
        import torch

        self.release()
        how: Any = {"dtype": torch.bfloat16, "device": device}
        self.query = torch.randn(rows, heads, 1, head_dim, **how)
        self.keys, self.values = (
            torch.randn(1, kv_heads, tokens, head_dim, **how).repeat(rows, 1, 1, 1)
            for _ in range(2)
        )
        return {"bytes": 2 * self.keys.nbytes}

    def attend(self, times: int) -> dict[str, Any]:
        import torch

        begin = time.perf_counter()
        for _ in range(times):
            out = torch.nn.functional.scaled_dot_product_attention(
                self.query, self.keys, self.values, enable_gqa=True
            )
        out[0, 0, 0, 0].item()  # a GPU has done all of it then
        return {"seconds": time.perf_counter() - begin}

    def release(self) -> dict[str, Any]:
        self.cache = self.query = self.keys = self.values = None
        return {}


if __name__ == "__main__":
    torch_decode_worker.main(Session())
