"""The facts about the GPU that kernels will run on."""

import contextlib
import dataclasses
import importlib
from contextlib import AbstractContextManager
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU, or an assumed one.

    Attributes:
      kind: its name in JAX.
      capability: its compute capability: 80 for Ampere, 89 for Ada, 90 for Hopper, 100 for
        Blackwell.
      multiprocessors: the number of them.
      interpret: kernels are interpreted on the CPU: slow, for tests.
    """

    kind: str
    capability: int
    multiprocessors: int
    interpret: bool = False


H200 = Device("NVIDIA H200", 90, 132)

# JAX caches traces and programs by the value of such a context, so that a jitted function is
# traced again for another device.
_assumed = jax.make_user_context(None)


def current_device() -> Device | None:
    """The GPU that the code being traced will run on.

    It is the assumed one, or JAX's default device; None if that is no NVIDIA GPU.
    """
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


def lowers_triton(device: Device) -> bool:
    """True where JAX can lower a kernel through Triton for a GPU: from Ampere on, as long as JAX has
    it."""
    if device.capability < 80:
        return False
    try:
        check_triton()
    except NotImplementedError:
        return False
    return True


def check_triton() -> None:
    """Raises NotImplementedError where JAX has no Triton, which it is to lose."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        raise NotImplementedError(
            f"JAX {jax.__version__} cannot lower Pallas kernels through Triton: {error}"
        ) from error


def import_kernels() -> None:
    """Imports the modules of kernels that add to what JAX's caches of traces depend on, where the
    code to be traced runs on a GPU.

    It is called before a trace: imported inside a trace they would have JAX trace, lower and compile
    the same once more at the next call, and a model's first layer apart from the others.
    """
    if current_device() is not None:
        with contextlib.suppress(ImportError):  # a backend says so when it is called
            importlib.import_module("jax.experimental.pallas.mosaic_gpu")
        with contextlib.suppress(ImportError):
            importlib.import_module("jax.experimental.pallas.triton")
        importlib.import_module("jaxshare.pallas.chosen_tiles")


def default_device() -> Any:
    """The device that JAX puts arrays on by default."""
    device = jax.config.jax_default_device or jax.devices()[0]
    return jax.devices(device)[0] if isinstance(device, str) else device


def assume_device(device: Device) -> AbstractContextManager[None]:
    """A context in which traces are for this GPU, whether there is one or not.

    It serves to compile for another machine, and to interpret kernels.
    """
    return _assumed(device)
