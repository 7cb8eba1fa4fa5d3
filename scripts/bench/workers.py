"""Workers over one shared cache: a pass of 2, 4 and 8 against a pass of one, and against the
authors' implementation of Hogwild! Inference.

    python -m scripts.bench.workers --hogwild DIR                 # the full measurement
    python -m scripts.bench.workers --quick                       # within three minutes on two cores
    python -m scripts.bench.workers --json --output FILE          # one JSON object

DIR is a checkout of https://github.com/eqimp/hogwild_llm, which runs under a Python of its own with
PyTorch and transformers 4.50 (--hogwild-python). Without it the goals that are set against it count
as not measured. How to read the result is in benchmarks/README.md.
"""

import collections
import contextlib
import dataclasses
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxshare.models import LoadedModel, load
from jaxshare.serving import Workers
from jaxshare.serving.cli import demo
from jaxshare.serving.evaluation import arithmetic
from scripts.bench.lib import (
    Parser,
    alternate,
    cores,
    finish,
    machine,
    own_command,
    progress,
    versions,
    write_checkpoint,
)
from scripts.bench.parts.workers.report import RELATIVE_GOALS, THEIRS, as_text, goals, summarise
from scripts.bench.parts.workers.sides import (
    ATTENTIONS,
    CURRENT,
    HOGWILD,
    MODEL,
    PLANS,
    STEP_ROOM,
    THEIR_PASSES,
    Run,
    fastest,
)
from scripts.bench.peer import WAITING, Worker, WorkerError, other_python

HISTORIES, WORKERS = (1024, 4096, 16384), (1, 2, 4, 8)
HOGWILD_PYTHON = ".venv-hogwild/bin/python"
WORKER = "scripts.bench.peers.hogwild"
STREAMED_PASSES = 256


def measure(
    model: LoadedModel,
    other: Worker | None,
    workers: Sequence[int],
    history: int,
    steps: int,
    rounds: int,
    seed: int,
    say: Callable[[str], None],
    make_run: Callable[[LoadedModel, int, int, int, int], Run] = Run,
) -> dict[str, Any]:
    """All numbers of workers over one length of history. The first turn of each side warms it up
    and is not timed."""
    say("compile")
    begin = time.perf_counter()
    runs = {n: make_run(model, n, history, steps, seed) for n in workers}
    with ThreadPoolExecutor(cores()) as pool:
        for done in [pool.submit(run.compile) for run in runs.values()]:
            done.result()
    compiled = time.perf_counter() - begin
    sides = {(n, name): side for n, run in runs.items() for name, side in run.sides().items()}
    for n in [n for n in workers if other and n in RELATIVE_GOALS]:
        other.ask("prepare", workers=n, history=history, current=CURRENT)
        sides[n, THEIRS] = lambda n=n: (
            other.ask("step", workers=n, passes=THEIR_PASSES)["seconds"] / THEIR_PASSES
        )
    say("warm up")
    alternate(sides, 1)
    if other:
        other.reset_idle()
    say("measure in turn")
    times = alternate(sides, rounds)
    for run in runs.values():
        run.check(rounds + 1)
    return {
        **summarise(history, model.config.num_layers, times),
        "compile_seconds": compiled,
        "temp_bytes": {
            str(n): run.loop.memory_analysis().temp_size_in_bytes for n, run in runs.items()
        },
        "cores_busy_while_waiting": {
            "jaxshare": other.idle_here.cores,
            THEIRS: other.idle_there.cores,
        }
        if other
        else {},
    }


def host_waits(budget: int) -> dict[str, int]:
    """Streams two workers of the embedded model; its forward passes, and how often the host waited
    for the device meanwhile."""
    session = Workers(
        demo.load_embedded(),
        arithmetic.make_problem(random.Random(0)).prompt(),
        names=arithmetic.NAMES[:2],
        budget=budget,
    )
    collections.deque(session.stream(), maxlen=0)
    return {"passes": session.passes, "waits": session.host_syncs}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run; histories, workers, rounds and steps as `--quick` has them where they
    were not given."""

    histories: tuple[int, ...]
    workers: tuple[int, ...]
    rounds: int
    steps: int
    quick: bool
    seed: int
    hogwild: str | None
    hogwild_python: str
    json: bool
    output: Path | None


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(prog="scripts.bench.workers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--histories", metavar="S,S", help="tokens of history (default 1024,4096,16384; quick 4096)"
    )
    parser.add_argument(
        "--workers",
        metavar="N,N",
        help="numbers of workers, 1 among them (default 1,2,4,8; quick 1,2,4)",
    )
    parser.add_argument("--rounds", type=int, help="turns of each side (default 7; quick 3)")
    parser.add_argument("--steps", type=int, default=16, help="passes a turn (default %(default)s)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer sizes, fewer turns: within three minutes on two cores",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, keys and values")
    parser.add_argument(
        "--hogwild",
        metavar="DIR",
        help="a checkout of https://github.com/eqimp/hogwild_llm to measure against",
    )
    parser.add_argument(
        "--hogwild-python",
        metavar="PATH",
        help="a Python with PyTorch and transformers 4.50 to run it with (default "
        f"{HOGWILD_PYTHON})",
    )
    parser.reporting()
    given = parser.parse_args(arguments)

    def default(full: Sequence[int], quick: Sequence[int]) -> str:
        return ",".join(map(str, quick if given.quick else full))

    workers = parser.numbers("--workers", given.workers or default(WORKERS, (1, 2, 4)), "1,2,4")
    histories = parser.numbers(
        "--histories", given.histories or default(HISTORIES, (4096,)), "1024,4096"
    )
    rounds = given.rounds if given.rounds is not None else 3 if given.quick else 7
    if 1 not in workers:
        parser.error(
            f"--workers is {given.workers}, but 1 must be among them: the others are held against "
            "one worker"
        )
    if max(histories) > MODEL["max_position_embeddings"] // 2:
        parser.error(
            f"--histories is {given.histories}, but the model's context holds at most "
            f"{MODEL['max_position_embeddings'] // 2}"
        )
    if rounds < 1 or not 1 <= given.steps <= STEP_ROOM - CURRENT or given.seed < 0:
        parser.error(
            f"--rounds is {rounds}, --steps {given.steps} and --seed {given.seed}, but rounds must "
            f"be at least 1, steps from 1 to {STEP_ROOM - CURRENT} and the seed at least 0"
        )
    parser.check_output(given.output)
    if given.hogwild and not (Path(given.hogwild) / "shared_cache").is_dir():
        parser.error(
            f"--hogwild is {given.hogwild}, but it must be a checkout of "
            "https://github.com/eqimp/hogwild_llm"
        )
    python = (
        other_python(
            parser,
            given.hogwild_python,
            option="--hogwild-python",
            made=HOGWILD_PYTHON,
            made_by="make parity HOGWILD=DIR",
        )
        if given.hogwild
        else ""
    )
    return Options(
        histories,
        workers,
        rounds,
        given.steps,
        given.quick,
        given.seed,
        given.hogwild,
        python,
        given.json,
        given.output,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
    where, found = machine(), {"jaxshare": versions(("jax", "jaxlib", "flax", "numpy"))}
    with contextlib.ExitStack() as stack:
        others = {}
        if options.hogwild:
            try:
                others = {
                    name: stack.enter_context(Worker(options.hogwild_python, WORKER, environment))
                    for name, environment in WAITING.items()
                }
                found[THEIRS] = [other.begin() for other in others.values()][-1]
            except WorkerError as error:
                print(
                    f"scripts.bench.workers: {options.hogwild_python} cannot run {HOGWILD} "
                    f"({error}): --hogwild-python takes a Python that has PyTorch and transformers "
                    "4.50, such as the one that `make parity HOGWILD=DIR` makes in .venv-hogwild",
                    file=sys.stderr,
                )
                return 2
        try:
            settings, results, streaming = measure_all(options, others)
        except WorkerError as error:
            print(f"scripts.bench.workers: {HOGWILD} could not go on: {error}", file=sys.stderr)
            return 1
    report = {
        "benchmark": "workers",
        "command": asked,
        "machine": where,
        "versions": found,
        "settings": settings,
        "results": results,
        "streaming": streaming,
    }
    finish(
        report,
        as_text(report),
        goals(results, streaming),
        as_json=options.json,
        output=options.output,
    )
    return 0


def measure_all(
    options: Options, others: dict[str, Worker]
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, int]]:
    """The settings of a run; the results, one a length of history; and those of streaming."""
    turns = len(options.histories) * 3 + 2 + bool(others)
    with tempfile.TemporaryDirectory() as folder, progress(turns) as say:
        say("weights")
        parameters = write_checkpoint(Path(folder), MODEL, options.seed)
        model, other, hogwild = load(folder), None, None
        if others:
            say("the authors' implementation: load")
            assert options.hogwild is not None
            other, hogwild = fastest(
                others, str(Path(options.hogwild).resolve()), folder, min(options.histories)
            )
        results = [
            measure(
                model,
                other,
                options.workers,
                history,
                options.steps,
                options.rounds,
                options.seed,
                lambda what, history=history: say(f"history {history}, {what}"),
            )
            for history in options.histories
        ]
        say("streaming")
        streaming = host_waits(STREAMED_PASSES)
    settings = {
        "parameters": parameters,
        "dtype": "bfloat16",
        "rounds": options.rounds,
        "steps": options.steps,
        "warm_up_turns": 1,
        "current": CURRENT,
        "step_room": STEP_ROOM,
        "plans_a_turn": PLANS,
        "attentions_a_turn": ATTENTIONS,
        "quick": options.quick,
        "seed": options.seed,
        "hogwild": hogwild and {**hogwild, "passes_a_turn": THEIR_PASSES},
        "model": MODEL,
    }
    return settings, results, streaming


if __name__ == "__main__":
    sys.exit(main())
