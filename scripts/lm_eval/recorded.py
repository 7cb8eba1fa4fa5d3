"""Runs of tasks with lm_eval, in which all requests and results are recorded.

Imported by both sides of the comparison, each in an environment of its own.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
TASKS = ("shared_choices", "shared_pages", "shared_answers", "shared_starts")


def evaluate(model: Any, folder: Path, tasks: Sequence[str] = TASKS) -> dict[str, Any]:
    """Runs tasks of a folder.

    Args:
      model: for lm_eval.
      folder: with the folder `tasks`.
      tasks: their names.

    Returns:
      `requests`, with the kind, the arguments and the result of each; `metrics` of each task, and
      the `seconds` that the model took.
    """
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    recorded: list[dict[str, Any]] = []
    seconds = 0.0

    def recording(kind: str) -> Any:
        answer = getattr(model, kind)

        def run(requests: list[Any]) -> list[Any]:
            nonlocal seconds
            start = time.perf_counter()
            results = answer(requests)
            seconds += time.perf_counter() - start
            recorded.extend(
                {"kind": kind, "arguments": [*request.args], "result": result}
                for request, result in zip(requests, results, strict=True)
            )
            return results

        return run

    for kind in KINDS:
        setattr(model, kind, recording(kind))
    here = os.getcwd()
    os.chdir(folder)  # the tasks name their data from here
    try:
        manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
        results: Any = lm_eval.simple_evaluate(
            model, tasks=[*tasks], task_manager=manager, bootstrap_iters=0, log_samples=False
        )
    finally:
        os.chdir(here)
        for kind in KINDS:
            delattr(model, kind)
    return {"requests": recorded, "metrics": results["results"], "seconds": seconds}
