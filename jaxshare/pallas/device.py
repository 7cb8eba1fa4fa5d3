"""What the GPU kernels have to know of the GPU that they will run on."""

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU, or one that is imitated.

    Attributes:
      kind: its name, as JAX gives it.
      capability: of compute: 80 for Ampere, 89 for Ada, 90 for Hopper, 100 for Blackwell.
      multiprocessors: how many it has.
      interpret: kernels are interpreted on the CPU: slow, for tests.
    """

    kind: str
    capability: int
    multiprocessors: int
    interpret: bool = False


H200 = Device("NVIDIA H200", 90, 132)

# JAX keeps traces and programs apart by the value of such a context, so that a jitted function is
# traced anew for another device.
_assumed = jax.make_user_context(None)


def current_device() -> Device | None:
    """The GPU that what is being traced will run on, JAX's default device; None if that is no
    NVIDIA GPU."""
    if assumed := _assumed.value:
        return assumed
    device = default_device()
    if (
        getattr(device, "platform", "") != "gpu"
        or not str(getattr(device, "compute_capability", "")).replace(".", "").isdigit()
    ):
        return None
    major, minor = str(device.compute_capability).split(".")
    return Device(device.device_kind, 10 * int(major) + int(minor), device.core_count)


def default_device() -> Any:
    """The device that JAX puts arrays on where none is named."""
    device = jax.config.jax_default_device or jax.devices()[0]
    return jax.devices(device)[0] if isinstance(device, str) else device


def assume_device(device: Device) -> AbstractContextManager[None]:
    """Traces in here are for this GPU, whether there is one or not: to compile for another machine,
    and to interpret kernels."""
    return _assumed(device)
