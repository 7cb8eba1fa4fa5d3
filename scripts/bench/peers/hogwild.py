"""The side of the authors' implementation of Hogwild! Inference, run by a Python that has PyTorch
and transformers 4.50.

`load_shared_cache`, `load_attention` and `load_formatting` give their modules to
make_hogwild_fixtures.py. As a program this is the other side of scripts.bench.workers: one JSON
object a line, in on stdin, out on stdout.

    (at the start)                                              -> versions
    {"do": "load", "hogwild": DIR, "folder": PATH, "dtype": NAME, "threads": N}
                                                                -> threads
    {"do": "prepare", "workers": N, "history": S, "current": C} -> nothing more; N steps of C tokens, all keys and values random
    {"do": "step", "workers": N, "passes": P}                   -> seconds

Every answer has `idle_seconds`, between the answer before and the request, and the CPU time that
this process took in them, `idle_cpu_seconds`. What cannot be done is answered with {"error":
SENTENCE}.
"""

import importlib
import importlib.util
import os
import re
import sys
import time
import types
import unittest.mock
import warnings
from typing import Any

from scripts.bench.peers.torch_decode import main


def load_shared_cache(folder: str) -> types.ModuleType:
    """The module `shared_cache` of a checkout of https://github.com/eqimp/hogwild_llm, without its
    kernels for GPUs.

    Raises:
      ValueError: the folder has no such module.
    """
    if not os.path.isfile(os.path.join(folder, "shared_cache", "cache_block.py")):
        raise ValueError(
            f"{folder} has no shared_cache/cache_block.py: name a checkout of "
            "https://github.com/eqimp/hogwild_llm"
        )
    os.environ.update(HOGWILD_USE_TRITON="0", HOGWILD_NO_COMPILE="1")
    sys.path.insert(0, folder)
    if importlib.util.find_spec("triton"):
        return importlib.import_module("shared_cache")
    # PyTorch for CPUs comes without Triton. Their module names it where it defines those kernels,
    # so something of that name stands there meanwhile; PyTorch's compiler would take it for the
    # real one, so that goes first.
    importlib.import_module("torch._dynamo")
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.jit, triton.language, language.tensor, language.constexpr = (
        lambda kernel: kernel,
        language,
        object,
        object,
    )
    sys.modules.update({"triton": triton, "triton.language": language})
    try:
        return importlib.import_module("shared_cache")
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


def load_attention(folder: str) -> types.ModuleType:
    """The module `hogwild.attention` of a checkout of the newer version, which works in PyTorch
    alone where its kernel is not built.

    Raises:
      ValueError: the folder has no such module.
    """
    # It looks for its own kernel through the distribution that it would be installed as, and goes
    # on without where that file is not there.
    with (
        unittest.mock.patch("importlib.metadata.distribution", side_effect=FileNotFoundError),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Could not load hogatt")
        return _load_file(folder, "inference_lib/python/hogwild/attention.py")


def load_formatting(folder: str, version: str) -> types.ModuleType:
    """The module of prompts and formatting rules of a checkout; version: "main" or "inference_lib".

    Raises:
      ValueError: the folder has no such module.
    """
    return _load_file(
        folder,
        {"main": "formatting.py", "inference_lib": "inference_lib/python/hogwild/formatting.py"}[
            version
        ],
    )


def _load_file(folder: str, path: str) -> types.ModuleType:
    """A module that imports none of its neighbours."""
    file = os.path.join(folder, path)
    if not os.path.isfile(file):
        raise ValueError(
            f"{folder} has no {path}: name a checkout of https://github.com/eqimp/hogwild_llm that "
            "has it"
        )
    name = "hogwild_" + re.sub(r"\W", "_", path.removesuffix(".py"))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Session:
    """The model, and the workers' caches."""

    def load(self, hogwild: str, folder: str, dtype: str, threads: int) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.shared_cache = load_shared_cache(hogwild)
        self.groups = {}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype=getattr(torch, dtype)
        ).eval()
        return {"threads": torch.get_num_threads()}

    def prepare(self, workers: int, history: int, current: int) -> dict[str, Any]:
        """Caches in the combined layout, as after a history and the beginnings of all current
        steps. Those of this many workers go."""
        import torch

        self.groups.pop(workers, None)
        common, *steps = (self.block(length) for length in (history, *[current] * workers))
        manager = self.shared_cache.SharedCacheManager(
            cache_structure=[[common, *(s for s in steps if s is not own), own] for own in steps]
        )
        self.groups[workers] = manager, torch.arange(workers)[:, None]
        return {}

    def block(self, length: int) -> Any:
        """A cache block of random keys and values."""
        import torch

        config, block = self.model.config, self.shared_cache.CacheBlock(config=self.model.config)
        shape = (1, config.num_key_value_heads, length, config.head_dim)
        for layer in range(config.num_hidden_layers):
            block.key_cache.append(torch.randn(shape, dtype=self.model.dtype))
            block.value_cache.append(torch.randn(shape, dtype=self.model.dtype))
            block.first_available_positions_by_layer[layer] = length
        return block

    def step(self, workers: int, passes: int) -> dict[str, Any]:
        manager, token = self.groups[workers]
        begin = time.perf_counter()
        for _ in range(passes):
            token = (
                self.model(**manager.get_input_kwargs(token)).logits[:, -1].argmax(-1, keepdim=True)
            )
        self.groups[workers] = manager, token
        return {"seconds": time.perf_counter() - begin}


if __name__ == "__main__":
    main(Session())
