"""Provenance: the versions and the code that the results of an evaluation are from."""

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jaxshare
from jaxshare import models
from jaxshare.serving import jsonl

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers", "math-verify")
_EVALUATION = ("baselines.py", "runs.py", "skeleton.py", "streams.py")
"""The modules of the evaluation that decide texts; the others decide problems and marks."""
_ROOMS = ("chat", "engine", "grammars", "kvcache", "logits_cache", "workers")


def versions() -> dict[str, str | None]:
    """The versions of jaxshare, Python and the packages that results depend on; None for those that
    are not installed."""
    found: dict[str, str | None] = {
        "jaxshare": jaxshare.__version__,
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def code() -> dict[str, str]:
    """A hash of the code that decides the texts of runs, for each package of it."""
    core, families, serving = (
        Path(str(module.__file__)).parent for module in (jaxshare, models, jsonl)
    )
    inside = {families, serving}  # of the core, once they are installed
    found = {
        "jaxshare": [path for path in core.rglob("*.py") if not inside.intersection(path.parents)],
        "jaxshare.models": [*families.rglob("*.py")],
        "jaxshare.serving": [*serving.glob("*.py")],
        **{f"jaxshare.serving.{room}": [*(serving / room).rglob("*.py")] for room in _ROOMS},
        "jaxshare.serving.evaluation": [serving / "evaluation" / name for name in _EVALUATION],
    }
    return {name: _hash(paths) for name, paths in found.items()}


def check_code(what: str, saved: Mapping[str, Any], advice: str) -> None:
    """Checks that a job goes on with the code that it began with.

    Args:
      what: the job.
      saved: its file; one of an earlier version, which has no hashes of code, is not compared.
      advice: the end of the error message.

    Raises:
      ValueError: code that decides texts has changed.
    """
    then, now = saved.get("code"), code()
    if not isinstance(then, dict):
        return
    changed = [name for name, value in now.items() if then.get(name, value) != value]
    if not changed:
        return
    version = (saved.get("versions") or {}).get("jaxshare", "unknown")
    raise ValueError(
        f"{what} began with other code, of jaxshare {version}: {' and '.join(changed)} "
        f"{'has' if len(changed) == 1 else 'have'} changed, and its runs may be different; {advice}, "
        "or go on with the code that it began with"
    )


def _hash(paths: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
