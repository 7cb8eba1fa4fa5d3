"""A drill: one promise, the fault that is thrown at it, and what ran and what held."""

import dataclasses
import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Drill:
    """A part of the drill.

    Attributes:
      name: of the part, for `--parts`.
      promise, fault: in words, for the table.
      case: one attack, with randomness of its own and an empty folder. Returns the number of faults
        that it threw; raises where the promise does not hold.
    """

    name: str
    promise: str
    fault: str
    case: Callable[[random.Random, Path], int]


@dataclasses.dataclass
class Record:
    """The cases of a part that ran.

    Attributes:
      drill: the part.
      cases, faults: how many ran, and the faults in them.
      failures: for each case that failed its seed and its error.
      seconds: of all cases.
    """

    drill: Drill
    cases: int = 0
    faults: int = 0
    failures: list[dict[str, object]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def survived(self) -> int:
        """The cases in which the promise held."""
        return self.cases - len(self.failures)

    def as_json(self) -> dict[str, object]:
        drill = self.drill
        return {
            "part": drill.name,
            "promise": drill.promise,
            "fault": drill.fault,
            "cases": self.cases,
            "faults": self.faults,
            "survived": self.survived,
            "failures": self.failures,
            "seconds": round(self.seconds, 1),
        }


def throw(
    drill: Drill, seed: int, folder: Path, *, seconds: float, most: int, say: Callable[[str], None]
) -> Record:
    """Runs the cases of a part from a seed on, for some seconds or until there are enough.

    Args:
      drill: the part.
      seed: of the first case; the next one has the next seed.
      folder: where each case gets a folder of its own.
      seconds, most: the bounds; one case runs in any case.
      say: takes a line for each failure.
    """
    record, begun = Record(drill), time.monotonic()
    while record.cases < most:
        number = seed + record.cases
        own = folder / f"{drill.name}-{number}"
        own.mkdir(parents=True)
        try:
            record.faults += drill.case(random.Random(f"{drill.name} {number}"), own)
        except Exception as error:  # any: the promise does not hold
            place = traceback.extract_tb(error.__traceback__)[-1]
            words = f"{type(error).__name__}: {error}"[:500]
            record.failures.append({"seed": number, "error": words, "line": place.lineno})
            say(f"{drill.name}, seed {number}: {words}")
        record.cases += 1
        record.seconds = time.monotonic() - begun
        if record.seconds >= seconds:
            break
    return record
