"""Decode speed of a model of random weights in bfloat16, a Llama of 125 M parameters or a model of
another family, against transformers: same weights, same cores, same run, in turn.

    python -m scripts.bench.decode                                # the full measurement
    python -m scripts.bench.decode --quick                        # all of it within three minutes on two cores
    python -m scripts.bench.decode --family moe                   # or mistral, phi, mla
    python -m scripts.bench.decode --json --output FILE           # one JSON object

transformers runs under a Python of its own that has PyTorch (--torch-python). While one side works
the other waits. Every row has a prompt of its own, so that nothing can be shared; what sharing one
prompt gives is measured beside it, without a goal. How to read the result is in
benchmarks/README.md.
"""

import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxshare.models import LoadedModel, load
from scripts.bench.lib import (
    Parser,
    alternate,
    finish,
    machine,
    own_command,
    progress,
    versions,
)
from scripts.bench.parts.decode.families import FAMILIES
from scripts.bench.parts.decode.options import Options, add_options, checked
from scripts.bench.parts.decode.report import (
    OURS,
    THEIRS,
    as_text,
    goals,
    summarise,
)
from scripts.bench.parts.decode.sides import PREFILL_ROWS, PREFILL_TOKENS, prepare
from scripts.bench.peer import TORCH_PYTHON, WAITING, Worker, WorkerError, fastest, other_python

WORKER = "scripts.bench.peers.torch_decode"


def measure(
    model: LoadedModel,
    worker: Worker,
    prompts: np.ndarray,
    steps: int,
    rounds: int,
    share: bool,
    copied: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """One batch, prompts int[R, S]; with `share` what one prompt for all rows gives, too. With
    `copied` the prompts are all the same, and each side computes the first and copies it.

    The first `steps` steps of each side warm it up; they are compared and not timed.
    """
    rows, growth = len(prompts), steps * (rounds + 1)
    say("compile")
    begin = time.perf_counter()
    runs = prepare(model, prompts, steps, growth, share, copied)
    compiled = time.perf_counter() - begin
    say("prefill")
    prefill = {name: run.prefill() for name, run in runs.items()}
    asked, copies = (prompts[:1], rows) if copied else (prompts, 1)
    start = worker.ask("prefill", tokens=asked.tolist(), copies=copies)
    say("warm up")
    trace = worker.ask("trace", steps=steps)
    for run in runs.values():
        run.step()
    agreement = compare(
        runs[OURS].state.outputs(),
        [start["tokens"], *trace["tokens"]],
        [start["near"], *trace["near"]],
    )
    say("decode in turn")
    worker.reset_idle()
    sides = {name: run.step for name, run in runs.items()}
    times = alternate(
        {
            OURS: sides.pop(OURS),
            THEIRS: lambda: worker.ask("step", steps=steps)["seconds"],
            **sides,
        },
        rounds,
    )
    for run in runs.values():
        run.check(growth)
    return {
        **summarise(rows, steps, times),
        "prefill_seconds": prefill | {THEIRS: start["seconds"]},
        "compile_seconds": compiled,
        "memory": {name: run.memory() for name, run in runs.items()},
        "agreement": agreement,
        "cores_busy_while_waiting": {OURS: worker.idle_here.cores, THEIRS: worker.idle_there.cores},
    }


def compare(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], near: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """The greedy tokens of both sides, each row up to its first difference: after it the sides read
    different texts.

    Args:
      ours: [R][N]; theirs: [N][R].
      near: [N][R], by how many spacings of its logits the other side's token beat its second best.
    """
    compared, differences = 0, []
    for r, tokens in enumerate(ours):
        for n, token in enumerate(tokens[: len(theirs)]):
            compared += 1
            if token != theirs[n][r]:
                differences.append(near[n][r])
                break
    return {
        "tokens": compared,
        "equal": compared - len(differences),
        "spacings_at_differences": sorted(differences),
    }


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(prog="scripts.bench.decode", description=__doc__.splitlines()[0])
    add_options(
        parser,
        quick_steps=4,
        quick="fewer and shorter turns, one prompt for all in the largest batch alone: within three "
        "minutes on two cores",
    )
    parser.add_argument(
        "--torch-python",
        metavar="PATH",
        help=f"a Python with PyTorch and transformers (default {TORCH_PYTHON})",
    )
    parser.add_argument(
        "--family", choices=FAMILIES, default="llama", help="of the model (default %(default)s)"
    )
    given = parser.parse_args(arguments)
    family = FAMILIES[given.family]
    python = functools.partial(other_python, parser, given.torch_python)
    return checked(parser, given, python, family=family)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
    where = machine()
    with contextlib.ExitStack() as stack:
        try:
            workers = {
                name: stack.enter_context(Worker(options.python, WORKER, env))
                for name, env in WAITING.items()
            }
            begun = [worker.begin() for worker in workers.values()]
        except WorkerError as error:
            print(
                f"scripts.bench.decode: {options.python} cannot run transformers ({error}): "
                "--torch-python takes a Python that has PyTorch and transformers, such as the one "
                "that `make parity` makes in .venv-torch",
                file=sys.stderr,
            )
            return 2
        try:
            settings, results = measure_all(options, workers)
        except WorkerError as error:
            print(f"scripts.bench.decode: transformers could not go on: {error}", file=sys.stderr)
            return 1
    found = {OURS: versions(("jax", "jaxlib", "flax", "numpy")), THEIRS: begun[0]}
    report = {
        "benchmark": "decode",
        "command": asked,
        "machine": where,
        "versions": found,
        "settings": settings,
        "results": results,
    }
    finish(
        report,
        as_text(report),
        goals(results, options.family.goals if options.prompt == options.family.prompt else {}),
        as_json=options.json,
        output=options.output,
    )
    return 0


def measure_all(
    options: Options, workers: dict[str, Worker]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings of a run, and the results, one a batch."""
    with tempfile.TemporaryDirectory() as folder, progress(len(options.batches) * 4 + 2) as say:
        say("weights")
        parameters = options.family.write(Path(folder), options.seed)
        model = load(folder)
        say("transformers: load")
        worker, torch = fastest(workers, folder)
        rng, results = np.random.default_rng([options.seed, 1]), []
        for batch in options.batches:
            vocab = options.family.config["vocab_size"]
            own = 1 if options.family.copied else batch
            prompts = rng.integers(0, vocab, (own, options.prompt)).repeat(batch // own, axis=0)
            # it costs half a minute of compilation
            share = batch > 1 and (not options.quick or batch == max(options.batches))
            results.append(
                measure(
                    model,
                    worker,
                    prompts,
                    options.steps,
                    options.rounds,
                    share,
                    options.family.copied,
                    lambda what, batch=batch: say(f"batch {batch}, {what}"),
                )
            )
    settings = {
        "family": options.family.title,
        "parameters": parameters,
        "dtype": "bfloat16",
        "prompt": options.prompt,
        "copies_of_one_prompt": options.family.copied,
        "rounds": options.rounds,
        "steps": options.steps,
        "warm_up_steps": options.steps,
        "quick": options.quick,
        "seed": options.seed,
        "prefill_rows": PREFILL_ROWS,
        "prefill_tokens": PREFILL_TOKENS,
        "torch": torch,
        "model": dict(options.family.config),
    }
    return settings, results


if __name__ == "__main__":
    sys.exit(main())
