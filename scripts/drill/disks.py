"""Disks that fail in the midst of whatever is written."""

import random
from pathlib import Path

from scripts.drill.drill import Drill
from tests.drill.disk_faults import ALL, POWER_LOSS, one_fault
from tests.drill.writers import JOBS, WHOLE_FILES, WRITERS

_FAULTS = 8


def throw_disk_faults(rng: random.Random, folder: Path) -> int:
    """Some operations of a random writer fail: the old state is there, or the new one whole."""
    kind = rng.choice([*WHOLE_FILES, *JOBS, *JOBS])
    try:
        writer, thrown = WRITERS[kind](folder, rng), 0
        operations = len(one_fault(writer, 10**9, ALL[0]).done)
        for _ in range(_FAULTS):
            # A power loss may also come when all is done.
            nth, error = rng.randrange(1, operations + 2), rng.choice(ALL)
            once = error != POWER_LOSS and rng.random() < 0.3
            thrown += one_fault(writer, nth, error, once=once).fired or error == POWER_LOSS
    except AssertionError as error:
        raise AssertionError(f"{kind}: {error}") from error
    return thrown


DRILLS = [
    Drill(
        "disks",
        "a disk that fails leaves the old state or the new one whole, and the job goes on",
        "no space, no quota, EIO, a read-only disk, short writes, power losses, at any operation",
        throw_disk_faults,
    )
]
