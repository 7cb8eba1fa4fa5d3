"""The speed of lm-evaluation-harness on requests with one few-shot prefix: jaxshare's adapter against
lm_eval's own backend `hf`, on the same checkpoint and cores, in turn.

    python -m scripts.bench.lm_eval                               # the full measurement: an hour on two cores
    python -m scripts.bench.lm_eval --quick                       # minutes
    python -m scripts.bench.lm_eval --models embedded --data gsm8k_test.jsonl
    python -m scripts.bench.lm_eval --json --output FILE          # one JSON object

A task of the form of gsm8k, eight examples before every question and greedy answers, is run by
lm_eval in two processes, each under a Python of its own (--python, --hf-python). `hf` runs with the
batch size and the way to wait for work that are fastest here, which are tried before. The models are
written by the benchmark: a Llama of 125 M parameters with random weights, and the embedded one. The
texts of both sides are compared. How to read the result is in benchmarks/README.md.
"""

import contextlib
import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.lib import (
    Goal,
    Parser,
    alternate,
    cores,
    finish,
    machine,
    own_command,
    progress,
    ratios,
    table,
)
from scripts.bench.parts.lm_eval.files import (
    MODELS,
    SHOTS,
    TASK,
    WARM_UP,
    problems,
    write_tasks,
)
from scripts.bench.peer import WAITING, Worker, WorkerError, other_python

WORKER = "scripts.bench.peers.lm_eval_side"
OURS, THEIRS = "jaxshare", "hf"
SPEED_GOAL, TEXT_GOAL = 3.0, 0.95
"""Times the requests a second of `hf`; and texts that are the same in float32, in which a sum in
another order may choose another of two tokens that are nearly as likely."""


@dataclasses.dataclass(frozen=True)
class LmEvalOptions:
    """The options of a run; counts as `--quick` has them where they were not given.

    Attributes:
      batches: sizes that are tried for `hf`.
      data: problems; None for some that are made up.
      python, hf_python: of the two sides.
    """

    models: tuple[str, ...]
    requests: int
    new_tokens: int
    rounds: int
    batches: tuple[int, ...]
    dtype: str
    data: Path | None
    python: str
    hf_python: str
    quick: bool
    seed: int
    json: bool
    output: Path | None


def parse(arguments: Sequence[str] | None) -> LmEvalOptions:
    parser = Parser(prog="scripts.bench.lm_eval", description=__doc__.splitlines()[0])
    parser.add_models([*MODELS])
    parser.add_argument("--requests", type=int, metavar="N", help="questions (default 32; quick 6)")
    parser.add_argument(
        "--new-tokens", type=int, metavar="N", help="of an answer, at most (default 128; quick 12)"
    )
    parser.add_argument("--rounds", type=int, help="turns of each side (default 3; quick 1)")
    parser.add_argument(
        "--batches", metavar="N,N", help="sizes tried for hf (default 1,8,16; quick 1,4)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of both sides (default %(default)s, in which texts are to be the same)",
    )
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="GSM8K's own problems (default: made up)"
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="a Python with jaxshare and lm_eval (default .venv-lm-eval/bin/python)",
    )
    parser.add_argument(
        "--hf-python",
        metavar="PATH",
        help="a Python with lm_eval and PyTorch (default .venv-lm-eval-hf/bin/python)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few requests and short answers, the embedded model"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and problems")
    parser.reporting()
    given = parser.parse_args(arguments)
    quick = given.quick
    counts = {
        name: (short if quick else long) if value is None else value
        for name, value, long, short in (
            ("requests", given.requests, 32, 6),
            ("new_tokens", given.new_tokens, 128, 12),
            ("rounds", given.rounds, 3, 1),
        )
    }
    parser.at_least(1, **counts)
    parser.at_least(0, seed=given.seed)
    if given.data is not None and not given.data.is_file():
        parser.error(f"--data is {given.data}, but there is no such file")
    models = parser.chosen_models(given, [*MODELS])
    batches = parser.numbers("--batches", given.batches or ("1,4" if quick else "1,8,16"), "1,8")
    parser.check_output(given.output)
    made: Mapping[str, Any] = {"made_by": "make lm-eval", "runs": "lm_eval"}
    python, hf_python = (
        other_python(parser, value, option=option, made=f"{folder}/bin/python", **made, packages=of)
        for option, value, folder, of in (
            ("--python", given.python, ".venv-lm-eval", "jaxshare and lm_eval"),
            ("--hf-python", given.hf_python, ".venv-lm-eval-hf", "lm_eval and PyTorch"),
        )
    )
    return LmEvalOptions(
        models,
        **counts,
        batches=batches,
        dtype=given.dtype,
        data=given.data,
        python=python,
        hf_python=hf_python,
        quick=quick,
        seed=given.seed,
        json=given.json,
        output=given.output,
    )


def common(texts: Sequence[str]) -> int:
    """The number of characters with which all texts begin."""
    same = (len({*each}) == 1 for each in zip(*texts, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, same))


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The texts of both sides, which must be answers to the same contexts.

    Returns:
      `compared` and `equal` texts, and of each that differs its number and the `characters` that it
        has in common at the start.

    Raises:
      RuntimeError: the contexts differ, so that the times are of different work.
    """
    if ours["contexts"] != theirs["contexts"]:
        raise RuntimeError("the two sides were given different requests by lm_eval")
    differences = [
        {"request": number, "characters": common([own, other])}
        for number, (own, other) in enumerate(zip(ours["texts"], theirs["texts"], strict=True))
        if own != other
    ]
    count = len(ours["texts"])
    return {"compared": count, "equal": count - len(differences), "differences": differences}


def fastest(
    workers: Mapping[str, Worker], batches: Sequence[int]
) -> tuple[str, int, dict[str, float]]:
    """The way to wait and the batch size with which `hf` is fastest, and the seconds of all that
    were tried, each once after one run that is not counted."""
    seconds = {}
    for (waiting, worker), batch in itertools.product(workers.items(), batches):
        if batch == batches[0]:
            worker.ask("run", task=WARM_UP, batch=batch)
        seconds[waiting, batch] = worker.ask("run", task=WARM_UP, batch=batch)["seconds"]
    waiting, batch = min(seconds, key=seconds.__getitem__)
    return waiting, batch, {f"{name}, batch {size}": s for (name, size), s in seconds.items()}


def measure(
    name: str,
    options: LmEvalOptions,
    ours: Worker,
    others: Mapping[str, Worker],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measures one model; the sides have begun, and may have had another one before."""
    lines = problems(SHOTS + options.requests, options.seed, options.data)
    with tempfile.TemporaryDirectory() as folder:
        say(f"{name}: write")
        texts = [f"Question: {each['question']}\nAnswer: {each['answer']}\n" for each in lines]
        MODELS[name](Path(folder) / "model", texts, options.seed)
        warm_up = min(max(options.batches), options.requests)  # as many as the largest batch has
        write_tasks(Path(folder), lines, new_tokens=options.new_tokens, warm_up=warm_up)
        how = {"folder": folder, "dtype": options.dtype, "threads": cores()}
        parameters = ours.ask("load", side=OURS, **how)["parameters"]
        for worker in others.values():
            worker.ask("load", side=THEIRS, **how)
        say(f"{name}: find hf's batch size")
        waiting, batch, tried = fastest(others, options.batches)
        say(f"{name}: compile")
        first = ours.ask("run", task=TASK, batch=None)
        say(f"{name}: in turn")
        for worker in (ours, others[waiting]):
            worker.reset_idle()
        found: dict[str, dict[str, Any]] = {}

        def side(which: str) -> float:
            worker = ours if which == OURS else others[waiting]
            found[which] = worker.ask("run", task=TASK, batch=batch if which == THEIRS else None)
            return found[which]["seconds"]

        times = alternate(
            {which: lambda which=which: side(which) for which in (OURS, THEIRS)}, options.rounds
        )
        busy = {OURS: ours.idle_there.cores, THEIRS: others[waiting].idle_there.cores}
        if found[OURS]["texts"] != first["texts"]:
            raise RuntimeError(f"{name}: jaxshare answered the same requests in two ways")
    return {
        "model": name,
        "parameters": parameters,
        "requests": options.requests,
        "context_characters": sum(map(len, first["contexts"])) / len(first["contexts"]),
        "prefix_characters": common(first["contexts"]),
        "seconds": times,
        "first_seconds": first["seconds"],
        "faster": ratios(times[THEIRS], times[OURS]),
        "hf": {"waiting": waiting, "batch": batch, "tried": tried},
        "cores_busy_while_waiting": busy,
        "texts": compare(found[OURS], found[THEIRS]),
    }


def goals(results: Sequence[Mapping[str, Any]], dtype: str) -> list[Goal]:
    """The goals of each model; texts have one in float32."""
    found = []
    for result in results:
        name, texts = result["model"], result["texts"]
        found.append(
            Goal(f"{name}: times hf's requests a second", result["faster"]["median"], SPEED_GOAL)
        )
        if dtype == "float32":
            share = texts["equal"] / texts["compared"]
            found.append(Goal(f"{name}: share of texts that are hf's", share, TEXT_GOAL))
    return found


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    settings, where = report["settings"], report["machine"]
    rows = [
        (
            result["model"],
            *(
                f"{result['requests'] / min(result['seconds'][side]):.2f}"
                for side in (OURS, THEIRS)
            ),
            f"{result['faster']['median']:.2f}",
            f"{result['faster']['lowest']:.2f} to {result['faster']['highest']:.2f}",
            f"{result['texts']['equal']} of {result['texts']['compared']}",
            f"{result['hf']['batch']}, {result['hf']['waiting']}",
            f"{result['first_seconds']:.1f}",
        )
        for result in report["results"]
    ]
    header = (
        "model",
        "requests/s",
        "hf",
        "times",
        "of rounds",
        "same texts",
        "hf's batch",
        "first seconds",
    )
    return (
        f"{settings['requests']} requests after {settings['shots']} examples, up to "
        f"{settings['new_tokens']} tokens each, {settings['dtype']}\n{where['cpu']}, "
        f"{where['cores']} cores, load {where['load_average']} at the start\n\n"
        f"{table(header, rows)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked, where = own_command(__file__, arguments), machine()
    try:
        problems(SHOTS + options.requests, options.seed, options.data)
    except (ValueError, OSError) as error:
        print(f"scripts.bench.lm_eval: {error}", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        try:
            ours = stack.enter_context(Worker(options.python, WORKER, {}))
            others = {
                name: stack.enter_context(Worker(options.hf_python, WORKER, env))
                for name, env in WAITING.items()
            }
            begun = [worker.begin() for worker in (ours, *others.values())]
            found = {OURS: begun[0], THEIRS: begun[1]}
            with progress(4 * len(options.models)) as say:
                results = [measure(name, options, ours, others, say) for name in options.models]
        except WorkerError as error:
            print(
                f"scripts.bench.lm_eval: a side could not go on ({error}); --python takes a Python "
                "with jaxshare and lm_eval, --hf-python one with lm_eval and PyTorch, as `make "
                "lm-eval` makes them",
                file=sys.stderr,
            )
            return 1
    settings = {
        "shots": SHOTS,
        "requests": options.requests,
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
        "batches": options.batches,
        "dtype": options.dtype,
        "problems": "file" if options.data else "made up",
        "threads": cores(),
        "quick": options.quick,
        "seed": options.seed,
    }
    report = {
        "benchmark": "lm_eval",
        "command": asked,
        "machine": where,
        "versions": found,
        "settings": settings,
        "results": results,
    }
    finish(
        report,
        as_text(report),
        goals(results, options.dtype),
        as_json=options.json,
        output=options.output,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
