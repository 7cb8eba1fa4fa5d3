"""Files of every kind that is read back, with random content and random damage."""

import logging
import random
from pathlib import Path

from scripts.drill.drill import Drill
from tests.drill.damage import random_damages, survive_these
from tests.drill.kinds import CHECKPOINTS, KINDS, QUICK

_TIMES, _OF_CHECKPOINTS = 40, 6
"""Damages of a file; a checkpoint's are fewer, since Orbax takes long to open one."""


def throw_damage(rng: random.Random, folder: Path) -> int:
    """Damages a file of a random kind: the same value, or an error in a sentence that names it."""
    kind = rng.choice([*QUICK, *QUICK, *CHECKPOINTS])
    readable = rng.choice(list(KINDS[kind](folder, rng)))
    content = readable.file.read_bytes()
    times = _OF_CHECKPOINTS if kind in CHECKPOINTS else _TIMES
    damages = random_damages(content, rng, times if content else 0, readable.other)
    logging.disable(logging.ERROR)  # what is damaged is said often
    try:
        return survive_these(readable, damages).cases
    except AssertionError as error:
        raise AssertionError(f"{kind}: {error}") from error
    finally:
        logging.disable(logging.NOTSET)


DRILLS = [
    Drill(
        "files",
        "a damaged file gives the same as before, or one sentence that names it",
        "bits flipped, spans cut, zeroed, moved, doubled and lost, bytes appended, files exchanged",
        throw_damage,
    )
]
