"""Fuzzes one reader by Atheris: `python -m tests.drill.fuzz_by_coverage KIND CORPUS -runs=1000`."""

import shutil
import sys
from pathlib import Path

import atheris  # pyright: ignore[reportMissingImports]

with atheris.instrument_imports(include=["jaxshare.models", "jaxshare.serving"]):
    from tests.drill.fuzz_targets import wrong


def main() -> None:
    """Reads what Atheris makes; an assertion ends it."""
    kind = sys.argv.pop(1)
    folder = Path(sys.argv[1]).parent  # which the drill removes

    def read(content: bytes) -> None:
        inside = folder / "inside"
        shutil.rmtree(inside, ignore_errors=True)
        inside.mkdir(parents=True)
        found = wrong(kind, inside, content)
        assert not found, found

    atheris.Setup(sys.argv, read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
