"""Programs lowered for GPUs that are not there."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
from jax.experimental.mosaic.gpu import utils
from jax.sharding import AbstractDevice, AbstractMesh

from jaxshare.pallas.device import Device, assume_device

BLACKWELL = Device("NVIDIA B200", 100, 148)


def lowered_for(
    device: Device, function: Callable[..., Any], *arguments: Any, **options: Any
) -> str:
    """A function as StableHLO for CUDA; arguments are shapes, options those of `jax.jit`.

    JAX lowers Triton kernels only for a described GPU.
    """
    described = AbstractMesh(
        (),
        (),
        abstract_device=AbstractDevice(
            device_kind=device.kind, num_cores=device.multiprocessors, platform="gpu"
        ),
    )
    with (
        # Mosaic takes each GPU that is not there for a Hopper.
        mock.patch.object(utils, "_infer_arch", lambda: divmod(device.capability, 10)),
        assume_device(device),
        jax.sharding.use_abstract_mesh(described),
    ):
        traced = jax.jit(function, **options).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
