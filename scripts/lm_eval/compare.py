"""jaxshare against lm_eval's own backend `hf`: the same requests, log-probabilities, greedy flags and
generated texts, and the time of both.

    python -m scripts.lm_eval.compare FOLDER

Runs where jaxshare and lm_eval are installed, without torch, on a folder that
scripts/lm_eval/make_expected.py has written. The tasks are run by jaxshare's model in this process,
by the command line that takes `--model jaxshare`, and over HTTP: by lm_eval's own model
`local-completions`, which asks `jaxshare serve`. Exit code 1 where they differ.
"""

import argparse
import contextlib
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxshare.serving.evaluation.lm_eval.model import JaxshareLM
from scripts.lm_eval.recorded import KINDS, TASKS, evaluate

CONTEXT = 256
"""The context of the model, which lm_eval does not ask a server for."""
TOLERANCE = 1e-4
"""Of a log-probability. Sums of many, in float32, have it relative to their size."""


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Compares two runs of the same tasks; a line for each difference."""
    wrong, pairs = [], zip(expected["requests"], found["requests"], strict=False)
    if len(expected["requests"]) != len(found["requests"]):
        wrong.append("the numbers of requests differ")
    for number, (theirs, ours) in enumerate(pairs):
        if [theirs["kind"], theirs["arguments"]] != [ours["kind"], ours["arguments"]]:
            wrong.append(f"request {number} is another one")
        elif not _same(theirs["result"], ours["result"]):
            kind = theirs["kind"]
            wrong.append(f"request {number}, {kind}: {theirs['result']!r}, {ours['result']!r}")
    return wrong


def _same(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, str):
        return theirs == ours
    if isinstance(theirs, float):
        return abs(theirs - ours) <= TOLERANCE * max(1.0, abs(theirs) / 100)
    return _same(theirs[0], ours[0]) and theirs[1] == ours[1]


def metrics_of_command(folder: Path) -> dict[str, Any]:
    """The metrics that the command line writes."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "jaxshare.serving.evaluation.lm_eval", "run"]
        command += ["--model", "jaxshare", "--model_args", f"pretrained={folder / 'model'}"]
        command += ["--tasks", ",".join(TASKS), "--include_path", str(folder / "tasks")]
        subprocess.run([*command, "--output_path", out], cwd=folder, check=True)
        (written,) = Path(out).rglob("results_*.json")
        return json.loads(written.read_text())["results"]


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves the model of a folder; gives the address of its server."""
    command = [sys.executable, "-m", "jaxshare.serving.cli", "serve", str(folder / "model")]
    command += ["--port", "0", "--served-model-name", "served", "--dtype", "float32"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = next(
                (found for line in process.stderr if (found := re.search(r"at (\S+)/v1", line))),
                None,
            )
            if found is None:
                raise RuntimeError("the server has not started")
            yield found[1]
        finally:
            process.terminate()


def evaluate_over_http(folder: Path) -> dict[str, Any]:
    """Runs the tasks by lm_eval's client of completions."""
    from lm_eval.models.openai_completions import (  # pyright: ignore[reportMissingImports]
        LocalCompletionsAPI,
    )

    with served(folder) as url:
        model = LocalCompletionsAPI(
            base_url=f"{url}/v1/completions",
            model="served",
            tokenizer=str(folder / "model"),
            tokenizer_backend="huggingface",
            max_length=CONTEXT,
            add_bos_token=True,
            num_concurrent=4,
        )
        found = evaluate(model, folder)
    # Of a longer text lm_eval's client makes other windows than `hf` does: they are a token shorter.
    fits = [_fits(model.tokenizer, request) for request in found["requests"]]
    return {**found, "requests": [*itertools.compress(found["requests"], fits)], "fits": fits}


def _fits(tokenizer: Any, request: dict[str, Any]) -> bool:
    is_rolling = request["kind"] == "loglikelihood_rolling"
    return not is_rolling or len(tokenizer.encode(request["arguments"][0])) < CONTEXT


def metric_differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Compares the metrics of tasks; a line for each difference."""
    return [
        f"{task}, {name}: {value}, {found[task].get(name)}"
        for task, metrics in expected.items()
        for name, value in metrics.items()
        if isinstance(value, float)
        and not math.isclose(value, found[task].get(name, math.nan), rel_tol=1e-3)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    expected = json.loads((folder / "expected.json").read_text())
    model = JaxshareLM(str(folder / "model"))
    first, again = evaluate(model, folder), evaluate(model, folder)
    wrong = differences(expected, first) + differences(expected, again)
    wrong += metric_differences(expected["metrics"], metrics_of_command(folder))
    over_http = evaluate_over_http(folder)
    fitting = {"requests": [*itertools.compress(expected["requests"], over_http["fits"])]}
    wrong += [f"over HTTP: {line}" for line in differences(fitting, over_http)]
    for line in wrong:
        print(line, file=sys.stderr)
    counts = [sum(r["kind"] == kind for r in expected["requests"]) for kind in KINDS]
    print(
        f"{', '.join(f'{n} {kind}' for n, kind in zip(counts, KINDS, strict=True))}: "
        f"{len(wrong)} differences. hf took {expected['seconds']:.2f} s, jaxshare "
        f"{first['seconds']:.2f} s with compilation and {again['seconds']:.2f} s again, "
        f"lm_eval's local-completions over HTTP {over_http['seconds']:.2f} s "
        f"for {sum(over_http['fits'])} of them."
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
