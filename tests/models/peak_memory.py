"""The memory that loading a model takes, in a process of its own."""

import subprocess
import sys
from pathlib import Path

_MEASURED = """
import sys
from jaxshare import models
from jaxshare.models import safetensors_io
import jax, jax.numpy as jnp

def memory(kind):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(kind)) * 1024

jax.block_until_ready(jnp.ones((256, 256)) @ jnp.ones((256, 256)))  # the libraries' own memory
before = memory("VmRSS")
model = models.load(sys.argv[1])
size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
print(size, memory("VmHWM") - before)
"""


def measured(folder: Path) -> tuple[int, int]:
    """Loads a model; returns bytes of its parameters, and by how many memory has grown at most."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, folder],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    size, peak = map(int, done.stdout.split())
    return size, peak
