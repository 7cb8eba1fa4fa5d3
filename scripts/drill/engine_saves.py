"""An engine that is saved after each of its calls: what the drill kills and restores.

python -m scripts.drill.engine_saves FOLDER REPORTED [--resume]
"""

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np

from jaxshare import Sampler, models
from jaxshare.serving.checkpoints import SavedCheckpoint, has_checkpoints
from jaxshare.serving.engine import Engine

CALLS = 6


def digest(folder: Path) -> tuple[int, str]:
    """The number of the newest checkpoint of a folder, and a digest of what is in it."""
    with SavedCheckpoint(folder) as saved:
        content = hashlib.sha256(json.dumps(saved.metadata, sort_keys=True).encode())
        for name, array in sorted(saved.arrays().items()):
            content.update(name.encode() + np.asarray(array).tobytes())
        return saved.number, content.hexdigest()


def main() -> None:
    """Reports the tokens of each call and how many of its prompt were known, and each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="takes the checkpoints")
    parser.add_argument("reported", type=Path, help="takes a line for each answer and checkpoint")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    done = 0
    engine = Engine(models.load("embedded"), logits_cache=10**5)
    if options.resume and has_checkpoints(options.folder):
        with SavedCheckpoint(options.folder) as saved:
            done = saved.number
        engine.restore(options.folder)
    with open(options.reported, "a", encoding="utf-8") as reported:

        def report(kind: str, *values: object) -> None:
            reported.write(json.dumps({kind: values}) + "\n")
            reported.flush()

        for number in range(done, CALLS):
            prompt = [*range(5 + number // 2, 45)]
            call = engine.submit(prompt, Sampler(temperature=1.0), max_new_tokens=4, seed=number)
            answer = call.wait()
            report("answer", number, answer.tokens, answer.reused_tokens)
            is_complete = number % 2 == 0  # the others are written while the next call runs
            engine.save(options.folder, wait=is_complete)
            if is_complete:
                report("checkpoint", *digest(options.folder))
    engine.shutdown()


if __name__ == "__main__":
    main()
