"""The time from the start of a program to its first step on a GPU: tracing, lowering and compiling
the decode loop of a published model, for an H200 that is described.

    python -m scripts.gpu.cold MODEL BACKEND      # one JSON object

A process of its own, because nothing is to be written down on the way: the reports of Mosaic and XLA
that scripts/gpu/compile.py reads take longer than compiling does. Seconds are those of the
processor, in all threads of this process. XLA's own products are not tuned, which takes a GPU, and
where a step reads prompts, passes of several tokens a row are compiled beside those of one.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bench.lib import ROOT
from scripts.gpu.compiler import Compiler, Toolchain

WIDTH = 16
"""T of passes that feed prompts."""
LLAMA_8B, QWEN_32B = "Llama-3.1-8B", "Qwen2.5-32B"
MODELS = (LLAMA_8B, QWEN_32B)
TARGETS = {"mosaic_gpu": "mosaic_gpu_v2", "triton": "__gpu$xla.gpu.triton"}
"""The name of a kernel's call in StableHLO, by backend."""


def config_of(name: str) -> Any:
    """The shapes of a published model."""
    from scripts.gpu import dense_models

    return {LLAMA_8B: dense_models.LLAMA_8B, QWEN_32B: dense_models.QWQ_32B}[name]


def measure(name: str, backend: str) -> dict[str, Any]:
    """Compiles the decode loop of four workers: seconds by step, and kernels of attention that
    were lowered."""
    toolchain = Toolchain.find()
    with tempfile.TemporaryDirectory(prefix="gpu_cold_") as folder:
        toolchain.prepare(Path(folder), reports=False)
        compiler = Compiler(toolchain, Path(folder))
        from jaxshare.pallas.device import H200, assume_device
        from scripts.gpu import programs

        seconds: dict[str, float] = {}
        config, step = config_of(name), programs.QUICK_STEPS[0]._replace(width=WIDTH)
        with assume_device(H200), compiler.inside():
            decoding = programs.decoding(step, backend, config)
            with _timed(seconds, "trace"):
                traced = compiler.trace(decoding.function, *decoding.arguments, donate_argnums=1)
            with _timed(seconds, "lower"):
                lowered = traced.lower(lowering_platforms=("cuda",))
            called = [
                line for line in lowered.as_text().splitlines() if f"@{TARGETS[backend]}(" in line
            ]
            others = ('name = "draw"', 'name = "add_and_normalise"')
            kernels = sum(not any(name in line for name in others) for line in called)
            with _timed(seconds, "compile"):
                compiler.finish(lowered)
    return {"layers": config.num_layers, "kernels": kernels, "processor_seconds": seconds}


def measured(name: str, backend: str) -> dict[str, Any]:
    """Measures as `measure` does, in a process of its own."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "MOSAIC_GPU_DUMP_TO")
    }
    command = [sys.executable, "-W", "ignore", "-m", "scripts.gpu.cold", name, backend]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-1000:])
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    before = _processor_seconds()
    yield
    seconds[name] = round(_processor_seconds() - before, 2)


def _processor_seconds() -> float:
    """Those of this process and of those it has waited for, ptxas for example."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:3])))
