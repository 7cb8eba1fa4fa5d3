"""Reads listings of compilers for GPUs: the registers, shared memory and instructions of kernels."""

import re


def read_ptxas(report: str) -> dict[str, dict[str, int]]:
    """The numbers of `ptxas -v` on each kernel: registers, spill_bytes, static_shared_bytes, and 1
    as `serialized` where each wgmma waits for the one before, by its name."""
    kernels, serialized = {}, re.findall(r"serialized due to .* in the function '([^']+)'", report)
    for name, body in re.findall(
        r"Compiling entry function '([^']+)'(.*?)(?=Compiling entry function|\Z)", report, re.S
    ):

        def number(pattern: str, body: str = body) -> int:
            return max(map(int, re.findall(pattern, body)), default=0)

        kernels[name] = {
            "registers": number(r"Used (\d+) registers"),
            "spill_bytes": number(r"(\d+) bytes spill (?:stores|loads)"),
            "static_shared_bytes": number(r"(\d+) bytes smem"),
            "serialized": int(name in serialized),
        }
    return kernels


PRODUCTS = {"wgmma": "wgmma.mma_async", "mma": "mma.sync", "tcgen05": "tcgen05.mma"}
"""Matrix instructions in PTX: those of Hopper's warpgroups, of any GPU's warps, and of Blackwell."""


def read_products(ptx: str) -> dict[str, dict[str, int]]:
    """The numbers of matrix instructions of each kind in the text of each kernel, by its name."""
    kernels = re.split(r"\.entry (\w+)", ptx)[1:]
    return {
        name: {kind: body.count(instruction) for kind, instruction in PRODUCTS.items()}
        for name, body in zip(kernels[::2], kernels[1::2], strict=True)
    }


def read_launches(sequence: str) -> dict[str, int]:
    """Kernels in XLA's list of launches: all bytes of shared memory by the kernel's name."""
    return {
        name: int(size)
        for name, size in re.findall(r"(\S+) grid: \[.*?shared_memory: (\d+) bytes", sequence)
    }


def read_dynamic_shared(passes: str) -> int:
    """The bytes that a Mosaic kernel takes at its launch, from its compiler's output between its
    passes."""
    launch = re.search(r"gpu\.launch.*dynamic_shared_memory_size (%[\w.]+)", passes)
    size = launch and re.search(rf"{re.escape(launch[1])} = arith\.constant (\d+) : i32", passes)
    if not size:
        raise ValueError(
            "Mosaic's dump does not say how much shared memory its kernel is launched with: look "
            "for it anew in this JAX"
        )
    return int(size[1])
