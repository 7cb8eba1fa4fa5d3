"""The drill: every promise is held against an injected fault, with seeds that are printed.

python -m scripts.drill.run --minutes 5
python -m scripts.drill.run --parts device,kill-batch --seed 7 --cases 1
"""

import argparse
import contextlib
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.bench import lib
from scripts.drill import (
    agent_kills,
    arguments,
    device,
    disks,
    files,
    fleet,
    fuzz,
    kills,
    server,
    server_soak,
    soak,
    starts,
)
from scripts.drill.drill import Drill, Record, throw

_MODULES = (
    *(device, soak, kills, starts, files, disks, fuzz, arguments, fleet, agent_kills),
    *(server, server_soak),
)
DRILLS: tuple[Drill, ...] = tuple(drill for module in _MODULES for drill in module.DRILLS)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = lib.Parser(
        prog="drill", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [drill.name for drill in DRILLS]
    parser.add_argument("--parts", default=",".join(names), help=f"some of {', '.join(names)}")
    parser.add_argument("--minutes", type=float, default=5.0, help="of all parts together")
    parser.add_argument("--cases", type=int, default=10**9, help="the most cases of a part")
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each part")
    parser.reporting()
    options = parser.parse_args(given)
    options.parts = parser.some_of("--parts", options.parts, names)
    if not options.minutes >= 0:
        parser.error(f"--minutes is {options.minutes}; give 0 or more")
    if options.cases < 1:
        parser.error(f"--cases is {options.cases}; give at least 1")
    return options


def _table(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        drill, counts = record.drill, (record.cases, record.faults, record.survived)
        rows.append((drill.name, drill.promise, drill.fault, *map(str, counts)))
    return lib.table(("part", "promise", "fault", "cases", "faults", "survived"), rows)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps logs from standard error: hundreds of failures are meant, and logged each."""
    logs = [logging.getLogger(name) for name in ("jaxshare", "asyncio")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def main(given: Sequence[str] | None = None) -> int:
    """Runs the parts; returns 1 if a promise did not hold."""
    options = _arguments(given)
    chosen = [drill for drill in DRILLS if drill.name in options.parts]
    seconds = 60 * options.minutes / len(chosen)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    records = []
    with _quiet(), tempfile.TemporaryDirectory(prefix="jaxshare-drill-") as folder:
        for drill in chosen:
            say(f"{drill.name}: {drill.fault}, from seed {options.seed} on")
            bounds = {"seconds": seconds, "most": options.cases}
            records.append(throw(drill, options.seed, Path(folder), say=say, **bounds))
    report = {
        "command": lib.command(sys.argv),
        "machine": lib.machine(),
        "versions": lib.versions(["jax", "jaxlib", "numpy", "orbax-checkpoint"]),
        "seed": options.seed,
        "parts": [record.as_json() for record in records],
    }
    goals = [lib.Goal(f"{r.drill.name}: survived", r.survived / r.cases, 1.0) for r in records]
    lib.finish(report, _table(records), goals, as_json=options.json, output=options.output)
    return int(any(record.failures for record in records))


if __name__ == "__main__":
    raise SystemExit(main())
