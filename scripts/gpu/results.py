"""Results of scripts/gpu/compile.py, each with its commit, its day and its JAX: a run that ends early, or
compiles some parts alone, leaves the others' as they are."""

import datetime
import importlib.metadata
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.lib import ROOT

_KEYS = ("backend", "name", "what")
"""The fields that tell the programs of a part apart."""


class Results:
    """Results by part, in the order in which they came first."""

    def __init__(self, parts: Sequence[str], former: Path | None):
        """Begins with the results of the file `former`, if it is there."""
        self._commit = current_commit()
        self._found: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {p: {} for p in parts}
        if former is not None and former.exists():
            report = json.loads(former.read_text(encoding="utf-8"))
            for part in parts:
                for result in report.get(part, []):
                    self._found[part][_key(result)] = result

    def is_new(self, part: str, about: Mapping[str, Any]) -> bool:
        """True if there is a result of this program, without an error, of this commit."""
        found = self._found[part].get(_key(about))
        if found is None or found["error"] is not None:
            return False
        return found.get("commit") == self._commit

    def add(self, part: str, result: Mapping[str, Any]) -> None:
        """Adds a result, in place of a former one of the same program."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        of = {"commit": self._commit, "date": today, "jax": importlib.metadata.version("jax")}
        self._found[part][_key(result)] = {**result, **of}

    def all(self) -> dict[str, list[dict[str, Any]]]:
        """The results of all parts that have any."""
        return {part: [*found.values()] for part, found in self._found.items() if found}


def _key(about: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(about.get(name) for name in _KEYS)


def current_commit() -> str:
    """The commit of the checkout, with a plus where files differ from it; empty without git."""
    done = subprocess.run(
        ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    return done.stdout.strip()
