"""Kernels lowered for a Blackwell GPU that is not there."""

from unittest import mock

import jax
from jax.experimental.mosaic.gpu import utils
from jax.sharding import AbstractDevice, AbstractMesh

from jaxshare.pallas.device import Device, assume_device
from scripts.gpu import programs

BLACKWELL = Device("NVIDIA B200", 100, 148)
INTERPRETED = Device("interpreted", 100, multiprocessors=2, interpret=True)
"""Two work items, so that most cuts fall inside blocks."""


def lowered_for_blackwell(case: programs.Case) -> str:
    """A call of the mosaic_gpu backend as StableHLO."""
    described = AbstractMesh(
        (), (), abstract_device=AbstractDevice(BLACKWELL.kind, BLACKWELL.multiprocessors, "gpu")
    )
    function, arguments = programs.attention(case, "mosaic_gpu")
    with (
        # Mosaic takes each GPU that is not there for a Hopper.
        mock.patch.object(utils, "_infer_arch", lambda: (10, 0)),
        assume_device(BLACKWELL),
        jax.sharding.use_abstract_mesh(described),
    ):
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
