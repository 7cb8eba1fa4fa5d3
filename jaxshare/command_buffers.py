"""Options with which XLA makes one graph of a whole program for an NVIDIA GPU, loops included.

By XLA's default a loop whose number of turns is not known is the host's: in every turn it waits
until the GPU has sent it one number. In a graph the GPU decides by itself, and the host has time to
prepare the next dispatch.
"""

import functools
import logging
import os

import jax
import jax.numpy as jnp

from jaxshare.pallas.device import current_device, default_device

log = logging.getLogger("jaxshare.command_buffers")

NAME = "xla_gpu_enable_command_buffer"
"""The option's name, in XLA_FLAGS too."""
COMMANDS = (
    "FUSION",
    "CUBLAS",
    "CUBLASLT",
    "CUSTOM_CALL",
    "CUDNN",
    "DYNAMIC_SLICE_FUSION",
    "CONDITIONAL",
    "WHILE",
)
"""The kinds of work that graphs take: XLA's default and loops. Collectives stay outside, as there:
a loop with some is the host's."""
LOOPS_IN_GRAPHS = {NAME: ",".join(COMMANDS)}
"""The option."""


def graph_options() -> dict[str, str]:
    """The `compiler_options` of a jitted loop: `LOOPS_IN_GRAPHS` where it runs on an NVIDIA GPU, XLA
    knows them, and XLA_FLAGS does not say otherwise; else none."""
    on_gpu = current_device() is not None and default_device().platform == "gpu"
    if not on_gpu or NAME in os.environ.get("XLA_FLAGS", ""):
        return {}
    return LOOPS_IN_GRAPHS if accepted(*LOOPS_IN_GRAPHS.items()) else {}


@functools.cache
def accepted(*options: tuple[str, str]) -> bool:
    """True if XLA compiles with these options for the default device."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        jax.jit(jnp.negative).lower(number).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        log.info("loops stay with the host: %s", error)
        return False
    return True
