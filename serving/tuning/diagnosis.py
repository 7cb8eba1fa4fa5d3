"""The state of an installation: versions, devices, attention backends, folders, and what to mend.

`jaxshare doctor` prints it.
"""

import dataclasses
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from huggingface_hub.constants import HF_HUB_CACHE
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxshare import KVCache, Layout, __version__, block_attention, compile_cache, cpu, make_plan
from jaxshare.attention.api import BACKENDS, preferred
from jaxshare.models import ModelConfig
from jaxshare.pallas.chosen_tiles import tiles_file
from jaxshare.pallas.device import default_device
from jaxshare.paths import cache_folder, unwritable_folder
from jaxshare.serving.kvcache.free_memory import host_free_bytes

EXTRAS = {
    "cuda13": "NVIDIA GPUs",
    "serve": "the HTTP server",
    "evaluate": "comparing answers to problems in mathematics",
    "parquet": "problems in Parquet files",
    "plot": "pictures",
    "gguf": "GGUF files",
    "orbax": "models and checkpoints in Orbax form",
    "transformers": "tokenizers without a tokenizer.json",
    "openai": "agents on models behind OpenAI's interface",
    "mcp": "agents with the tools of MCP servers",
    "ray": "replicas on several machines",
    "otel": "traces of the server's requests",
    "lm-eval": "the tasks of lm_eval",
    "tunix": "samples for the learners of Tunix",
    "train": "training the small models of scripts/train",
}
"""The extras of a user, and the purpose of each."""
SERVING = tuple(name for name in BACKENDS if name != "reference")
"""The backends that a pass may run on; the reference is for tests."""
LLAMA_8B = ModelConfig.from_json(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
)
"""The shape of Llama 3.1 8B."""
_DRIVER = Path("/proc/driver/nvidia/version")
_VARIABLES = ("JAX", "XLA_", "CUDA_VISIBLE", "HF_", "LD_LIBRARY_PATH")
"""Beginnings of the names of environment variables that change what runs."""
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclasses.dataclass(frozen=True)
class Package:
    """A package that jaxshare, or an extra of it, requires.

    Attributes:
      name: on the package index.
      version: the installed one, or None.
      wanted: the range of versions that were tried, such as "<3,>=2.2".
    """

    name: str
    version: str | None
    wanted: str

    @property
    def fits(self) -> bool:
        """True if a version is installed that was tried."""
        return self.version is not None and Requirement(f"x{self.wanted}").specifier.contains(
            self.version, prereleases=True
        )


@dataclasses.dataclass(frozen=True)
class BackendCheck:
    """The outcome of tracing attention with one backend.

    Attributes:
      name: of the backend.
      reason: the backend's own words where it cannot serve the call, else None.
    """

    name: str
    reason: str | None


@dataclasses.dataclass(frozen=True)
class Trial:
    """The outcome of comparing what a device computes with another way to compute the same.

    Attributes:
      name: of what was computed.
      error: how far it is from the other way; None where it failed.
      allowed: what may be rounding.
      failure: the error that was raised, else None.
    """

    name: str
    error: float | None
    allowed: float
    failure: str | None = None

    @property
    def is_right(self) -> bool:
        return self.error is not None and self.error <= self.allowed


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The state of an installation.

    Attributes:
      versions: of jaxshare, Python and the system.
      packages: those that jaxshare requires.
      extras: by name, the packages of each extra; a package may be missing.
      devices: of JAX, one entry for each kind: platform, kind, count, and bytes of memory or None.
      processor: what the CPU kernels use, or why they are not used.
      free_host_bytes: of main memory.
      preferred: the backends that are tried, in order, where none is named.
      backends: the check of each backend for the shape that was asked for.
      shape: that shape in words.
      folders: files and folders of caches by purpose: path, bytes, and why it cannot be written.
      variables: environment variables that change what runs; secrets are not shown.
      problems: sentences, each with what would do.
      trials: of what the device computes; none unless they were asked for.
    """

    versions: dict[str, str]
    packages: list[Package]
    extras: dict[str, list[Package]]
    devices: list[dict[str, Any]]
    processor: str
    free_host_bytes: int
    preferred: tuple[str, ...]
    backends: list[BackendCheck]
    shape: str
    folders: dict[str, dict[str, Any]]
    variables: dict[str, str]
    problems: list[str]
    trials: Sequence[Trial] = ()

    @property
    def backend(self) -> str | None:
        """The backend that runs where none is named, or None if none can serve the shape."""
        serving = {check.name for check in self.backends if check.reason is None}
        return next((name for name in self.preferred if name in serving), None)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {**dataclasses.asdict(self), "backend": self.backend}


def diagnose(
    config: ModelConfig | None = None, dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> Diagnosis:
    """Looks at this installation. Nothing is compiled, downloaded or written.

    Args:
      config: of the model whose attention the backends are asked for; default that of Llama 3.1 8B.
      dtype: of its cache.
    """
    packages, extras = _packages()
    config = config or LLAMA_8B
    found = Diagnosis(
        versions={
            "jaxshare": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        packages=packages,
        extras=extras,
        devices=_devices(),
        processor=_processor(),
        free_host_bytes=host_free_bytes(),
        preferred=preferred(),
        backends=[check_backend(name, config, dtype) for name in SERVING],
        shape=_words(config, dtype),
        folders=_folders(),
        variables=_variables(os.environ),
        problems=[],
    )
    return dataclasses.replace(found, problems=_problems(found))


def _packages() -> tuple[list[Package], dict[str, list[Package]]]:
    """The packages that the installation's metadata names; none if jaxshare is not installed."""
    try:
        lines = importlib.metadata.requires("jaxshare") or []
    except importlib.metadata.PackageNotFoundError:
        return [], {}
    requirements = [Requirement(line) for line in lines]
    needed = [
        _package(r) for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})
    ]
    extras = {
        extra: [
            _package(r)
            for r in requirements
            if r.marker is not None
            and not r.marker.evaluate({"extra": ""})
            and r.marker.evaluate({"extra": extra})
        ]
        for extra in EXTRAS
    }
    return needed, extras


def _package(requirement: Requirement) -> Package:
    names = [requirement.name, *_plugins(requirement)]
    versions = [_version(name) for name in names]
    version = None if None in versions else versions[0]
    return Package(
        canonicalize_name(requirement.name)
        + (f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""),
        version,
        str(requirement.specifier),
    )


def _plugins(requirement: Requirement) -> list[str]:
    """The packages that only an extra brings: JAX itself is there with or without CUDA."""
    return ["jax-cuda13-plugin"] if "cuda13" in requirement.extras else []


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    kinds: dict[tuple[str, str], list[Any]] = {}
    for device in jax.devices():
        kinds.setdefault((device.platform, device.device_kind), []).append(device)
    return [
        {
            "platform": name,
            "kind": kind,
            "count": len(devices),
            "bytes": (devices[0].memory_stats() or {}).get("bytes_limit"),
        }
        for (name, kind), devices in kinds.items()
    ]


def _processor() -> str:
    if not cpu.available():
        return (
            "none (JAXSHARE_CPU_KERNELS is off, llvmlite is missing, or the processor is not "
            "served); XLA's own code is slower"
        )
    from jaxshare.cpu.compiled import this_machine

    machine = this_machine()
    units = [f"vectors of {machine.lanes} float32"]
    units += ["bfloat16 products"] if machine.dots_bf16 else []
    units += ["a matrix unit (AMX)"] if "amx-bf16" in machine.features else []
    return ", ".join(units)


def _words(config: ModelConfig, dtype: jax.typing.DTypeLike) -> str:
    words = [
        f"{config.num_heads} heads",
        f"{config.num_kv_heads} kv heads",
        f"head dim {config.head_dim}",
        str(jnp.dtype(dtype)),
    ]
    words += ["windows"] if any(config.windows) else []
    words += ["softcaps"] if config.attention_softcap else []
    words += ["sinks"] if config.attention_sinks else []
    return ", ".join(words)


def check_backend(name: str, config: ModelConfig, dtype: jax.typing.DTypeLike) -> BackendCheck:
    """Traces the attention of two rows that share a block, as a decode step has it, in the layer
    that asks most of a backend."""

    def attend() -> jax.Array:
        cache = KVCache.create(config, (64, 64, 64), dtype)
        layout = Layout.from_blocks([[0, 1], [0, 2]])
        plan = make_plan(
            cache, layout, jnp.ones(2, jnp.int32), 1, window=max(config.windows, default=0)
        )
        return block_attention(
            jnp.zeros((2, 1, config.num_heads, config.head_dim), dtype),
            cache.keys[0],
            cache.values[0],
            plan,
            softcap=config.attention_softcap,
            sinks=jnp.zeros(config.num_heads) if config.attention_sinks else None,
            implementation=name,
        )

    try:
        jax.eval_shape(attend)
    except NotImplementedError as error:
        own = str(error).removeprefix("no attention backend can do this: ")
        return BackendCheck(name, own.removeprefix(f"{name}: "))
    return BackendCheck(name, None)


def _folders() -> dict[str, dict[str, Any]]:
    compiled = jax.config.jax_compilation_cache_dir
    return {
        "compiled programs": _folder(Path(compiled) if compiled else None),
        "measurements": _folder(cache_folder(), "*.json"),
        "models of the hub": _folder(Path(HF_HUB_CACHE)),
    }


def _folder(path: Path | None, pattern: str = "**/*") -> dict[str, Any]:
    if path is None:
        return {"path": None, "bytes": 0, "free_bytes": None, "unwritable": None}
    held = sum(file.lstat().st_size for file in path.glob(pattern) if file.is_file())
    existing = next(p for p in (path, *path.parents) if p.exists())
    return {
        "path": str(path),
        "bytes": held,
        "free_bytes": shutil.disk_usage(existing).free,
        "unwritable": unwritable_folder(path),
    }


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "(set)" if any(word in name for word in _SECRETS) else value
        for name, value in sorted(environment.items())
        if name.startswith(_VARIABLES)
    }


# Problems.


def _problems(found: Diagnosis) -> list[str]:
    return [
        *_package_problems(found.packages, found.extras),
        *_device_problems(found),
        *_folder_problems(found.folders),
    ]


def _package_problems(
    packages: Sequence[Package], extras: Mapping[str, Sequence[Package]]
) -> list[str]:
    wrong = [f"{p.name} {p.version or 'is missing'} ({p.wanted})" for p in packages if not p.fits]
    problems = []
    if not packages:
        problems.append(
            "jaxshare is not installed, so the versions of packages cannot be compared with those "
            "that were tried; pip install -e . in the checkout"
        )
    if wrong:
        problems.append(
            f"packages outside the versions that were tried: {', '.join(wrong)}; "
            "pip install --upgrade jaxshare"
        )
    for extra, members in extras.items():
        present = [p for p in members if p.version is not None]
        old = [f"{p.name} {p.version} ({p.wanted})" for p in present if not p.fits]
        if old and len(present) == len(members):
            problems.append(
                f"of the extra {extra}, outside the versions that were tried: {', '.join(old)}; "
                f"pip install --upgrade 'jaxshare[{extra}]'"
            )
    return problems


def _device_problems(found: Diagnosis) -> list[str]:
    problems = []
    on_gpu = default_device().platform == "gpu"
    if _DRIVER.exists() and not on_gpu:
        problems.append(
            "this machine has an NVIDIA driver, but JAX runs on "
            f"{default_device().platform}; pip install 'jaxshare[cuda13]', and see that "
            "JAX_PLATFORMS does not name cpu"
        )
    if found.backend is None:
        problems.append(f"no attention backend serves {found.shape}; see the reasons of each")
    elif on_gpu and found.backend == "xla":
        problems.append(
            "attention on this GPU runs as XLA compiles it, which is slower than the kernels; see "
            "the reasons of mosaic_gpu and triton"
        )
    elif on_gpu and not tiles_file().is_file():
        problems.append(
            "the kernels use built-in tiles; `jaxshare tune` finds the fastest on this GPU"
        )
    if not on_gpu and not cpu.available():
        problems.append(
            "the CPU kernels are not used; unset JAXSHARE_CPU_KERNELS, or pip install llvmlite"
        )
    return problems


def _folder_problems(folders: Mapping[str, Mapping[str, Any]]) -> list[str]:
    named = {
        "compiled programs": compile_cache.VARIABLE,
        "measurements": "JAXSHARE_CACHE",
        "models of the hub": "HF_HOME",
    }
    return [
        f"the folder of {purpose}, {folder['path']}, cannot be written ({folder['unwritable']}); "
        f"set {named[purpose]} to one that can be"
        for purpose, folder in folders.items()
        if folder["unwritable"]
    ]
