"""The GPUs that scripts/gpu compiles for, described as XLA's compiler wants them; none has to be
there."""

import dataclasses
from typing import Any

KIB, MIB = 1024, 1024**2


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU. Its numbers are those that CUDA's device properties give on it, and the table of
    compute capabilities in NVIDIA's CUDA C Programming Guide; rates are those of its data sheet.

    Attributes:
      kind: its name in JAX.
      capability: (major, minor).
      multiprocessors: the number of them.
      threads: the most of a multiprocessor.
      shared: bytes of shared memory that a block may ask for, and bytes of a multiprocessor.
      level2: bytes of the level-2 cache.
      memory: bytes of device memory.
      bandwidth: bytes a second of it.
      clock: GHz.
    """

    kind: str
    capability: tuple[int, int]
    multiprocessors: int
    threads: int
    shared: tuple[int, int]
    level2: int
    memory: int
    bandwidth: float
    clock: float

    @property
    def architecture(self) -> str:
        """Its name to ptxas. From Hopper on there are instructions that only one architecture has."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + "a" * (major >= 9)

    @property
    def device(self) -> Any:
        """Its `jaxshare.pallas.device.Device`. It imports JAX."""
        from jaxshare.pallas.device import Device

        major, minor = self.capability
        return Device(self.kind, 10 * major + minor, self.multiprocessors)

    @property
    def description(self) -> str:
        """A GpuTargetConfigProto in text form."""
        major, minor = self.capability
        block, multiprocessor = self.shared
        return f"""\
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {self.multiprocessors}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {self.threads}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  fpus_per_core: {64 if self.capability == (8, 0) else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_block_optin: {block}
  shared_memory_per_core: {multiprocessor}
  l2_cache_size: {self.level2}
  device_memory_size: {self.memory}
  memory_bandwidth: {self.bandwidth:.0f}
  clock_rate_ghz: {self.clock}
}}
platform_name: "CUDA"
device_description_str: "{self.kind}"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 12 }}
"""


HOPPER = Target(
    "NVIDIA H200", (9, 0), 132, 2048, (227 * KIB, 228 * KIB), 50 * MIB, 150 * 10**9, 4.8e12, 1.98
)
TARGETS = {
    "h200": HOPPER,
    "b200": Target(
        "NVIDIA B200",
        (10, 0),
        148,
        2048,
        (227 * KIB, 228 * KIB),
        126 * MIB,
        180 * 10**9,
        8e12,
        1.96,
    ),
    "rtx-pro-6000": Target(
        "NVIDIA RTX PRO 6000",
        (12, 0),
        188,
        1536,
        (99 * KIB, 100 * KIB),
        128 * MIB,
        96 * 10**9,
        1.6e12,
        2.43,
    ),
    "l40": Target(
        "NVIDIA L40", (8, 9), 142, 1536, (99 * KIB, 100 * KIB), 96 * MIB, 48 * 10**9, 864e9, 2.52
    ),
    "a100": Target(
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        108,
        2048,
        (163 * KIB, 164 * KIB),
        40 * MIB,
        80 * 10**9,
        2.039e12,
        1.41,
    ),
}
"""By the names of the command line, newest first but for the H200, for which the kernels are
written."""
