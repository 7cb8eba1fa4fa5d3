"""The memory that loading a model takes, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

_BEGIN = """
import json, pathlib, sys
from jaxshare import models
import jax, jax.numpy as jnp

def memory(kind):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(kind)) * 1024

jax.block_until_ready(jnp.ones((256, 256)) @ jnp.ones((256, 256)))  # the libraries' own memory
"""

_WHOLE = """
before = memory("VmRSS")
model = models.load(sys.argv[1])
size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
print(size, memory("VmHWM") - before)
"""

_PARTS = """
from jaxshare import sharding
from jaxshare.models import partial_reads, safetensors_files, safetensors_io, tensor_parallel

folder = pathlib.Path(sys.argv[1])
config = models.ModelConfig.from_json(folder)
mesh = sharding.make_mesh(**json.loads(sys.argv[2]))
stored = safetensors_files.stored_tensors(folder)
expected = safetensors_io.match_tensors(config, stored, folder)
module = tensor_parallel.ShardedDecoder(tensor_parallel.fit(config, mesh), mesh)
reader = partial_reads.PartialReader(stored, expected, config, module, jnp.dtype("bfloat16"))
before = memory("VmRSS")
kept = [parts for _, _, parts in reader.parts([*mesh.devices.flat][: int(sys.argv[3])])]
size = sum({id(part): part.nbytes for parts in kept for part in parts.values()}.values())
print(size, memory("VmHWM") - before)
"""


def measured(folder: Path) -> tuple[int, int]:
    """Loads a model; returns bytes of its parameters, and by how many memory has grown at most."""
    return _run(_WHOLE, str(folder))


def measured_in_parts(folder: Path, sizes: dict[str, int], devices: int) -> tuple[int, int]:
    """Reads the parts of a process that has the first devices of a mesh; returns as `measured`."""
    return _run(_PARTS, str(folder), json.dumps(sizes), str(devices))


def _run(program: str, *arguments: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + program, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
    )
    size, peak = map(int, done.stdout.split())
    return size, peak
