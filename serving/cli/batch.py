"""The command `jaxshare batch`: completions of a file of prompts.

They are written as they finish, and continued after a kill with nothing lost or sampled twice.

    jaxshare batch MODEL --input prompts.jsonl --output out.jsonl --n 16

All prompts of the file are one run of the engine, so common beginnings of several lines are stored
and read once. A completion depends on the seed, its prompt and its number alone. That is why a job
needs no state but its own output: completions that are there are skipped, the rest is sampled, and
the texts are those of an unbroken run. OUTPUT.job beside it keeps the settings, so that no other
job is mixed into it, and the identity of the model, which may change under its name. While a job
runs, the output is locked.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxshare import Sampler, progress
from jaxshare.models import LoadedModel
from jaxshare.paths import check_file
from jaxshare.serving import jsonl
from jaxshare.serving.branches.batch_input import Item, read_input
from jaxshare.serving.branches.data_parallel import branches
from jaxshare.serving.branches.prompt_tree import Branch
from jaxshare.serving.cli import arguments, batch_output, request_batch, resuming
from jaxshare.serving.cli.batch_output import AGAIN, OTHER, Key, known_model, open_existing
from jaxshare.serving.cluster import process_mesh, ray_pool
from jaxshare.serving.cluster.model_spec import ModelSpec
from jaxshare.serving.cluster.shards import Shards
from jaxshare.serving.errors import RefusedInputError
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.inputs import default_sampler, warn_of_equal_texts
from jaxshare.serving.locks import OutputLock

_SHARE = {"auto": None, "always": True, "never": False}
_INCOMPLETE = 3
"""The exit code when lines could not be read or logits were not finite; the others have run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare batch`."""
    arguments.add_model(parser)
    parser.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help='JSON lines: {"prompt": "..."}, {"messages": [...]} or {"tokens": '
        '[...]}, optionally with an "id", an "n", a "temperature", "top_k", "top_p" and "min_p" of '
        "its own; or lines of OpenAI's batch format, answered in that format",
    )
    parser.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="JSON lines, one per completion, written as they finish and put into "
        "the order of the input at the end",
    )
    parser.add_argument(
        "--tree",
        action="store_true",
        help='every line is a tree: {"text": "...", "children": [...], "n": 4}',
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="a prompt is a user's message, put into the model's chat template",
    )
    parser.add_argument(
        "--n",
        type=int,
        default=1,
        help="completions of each prompt that names no other number (default 1)",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, help="maximum tokens of a completion (default 64)"
    )
    parser.add_argument(
        "--max-rows",
        type=int,
        metavar="N",
        help="completions that run at once, at most (default: as many as the "
        "memory has room for, up to 4096)",
    )
    parser.add_argument(
        "--max-kv-bytes",
        metavar="BYTES",
        help="memory for keys and values, such as 2e9, 2GB or 512MiB",
    )
    parser.add_argument(
        "--share",
        choices=tuple(_SHARE),
        default="auto",
        help="store common prefixes once for all: where it pays (default), always or never",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the whole job; no two completions, nor two seeds, share random "
        "numbers (default 0)",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="by which lines of OpenAI's format name the model; may be given several times "
        "(default: MODEL)",
    )
    process_mesh.add_arguments(parser)
    ray_pool.add_arguments(parser)
    resuming.add_resume(parser, "the job that started the output")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout at the end")
    arguments.add_sampling(parser)
    arguments.add_chat_template(parser)
    arguments.add_stops(parser)
    arguments.add_grammar(parser)
    arguments.add_logprobs(parser, "in each line")


def run(options: argparse.Namespace) -> int:
    """Runs `jaxshare batch`, here or on a pool of replicas; see `run_job`."""
    with batch_output.refusing():
        sampling = arguments.sampling_of(options)
    if request_batch.has_requests(options):
        return request_batch.run_job(options, sampling)
    if pool := ray_pool.of_options(options):
        return _run_on_replicas(pool, options, sampling)
    mesh = process_mesh.mesh_of(options)

    def load() -> LoadedModel:
        return arguments.load_model(options, mesh)

    return run_job(options, sampling, load, branches)


def _run_on_replicas(
    pool: ray_pool.RayPool, options: argparse.Namespace, sampling: dict[str, Any]
) -> int:
    """Runs a job on replicas, which load the model themselves; here it has no parameters."""
    spec = ModelSpec.of(options)
    with contextlib.ExitStack() as running:

        def engine(model: LoadedModel, *prompts: Any, **settings: Any) -> Shards:
            return Shards(running.enter_context(pool), spec.load, model, *prompts, **settings)

        return run_job(options, sampling, spec.outline, engine)


def run_job(
    options: argparse.Namespace,
    sampling: dict[str, Any],
    load: Callable[[], LoadedModel],
    make_engine: Callable[..., Any],
) -> int:
    """Runs a job, or what is left of it.

    Args:
      options: those of `add_arguments`.
      sampling: fields of `Sampler` that were given; the others are the checkpoint's own.
      load: gives the model. Errors that do not depend on it are raised before.
      make_engine: makes what samples, as `Branches` does.

    Returns:
      0; or 3 if lines of the input are bad, or the model's logits for some completions are not finite:
        each has its error in the output. Both are said on stderr, and the others have run.

    Raises:
      RefusedInputError: wrong settings, an input that cannot be read or has no line that can be run.
      ValueError: an output that cannot be written, is there already or belongs to another job.
    """
    max_kv_bytes = _check(options)
    with batch_output.refusing():
        data = batch_output.read_file(options.input, "input")
    output, job = Path(options.output), Path(f"{options.output}.job")
    settings = _settings(options, sampling, data)
    with contextlib.ExitStack() as files:
        files.enter_context(OutputLock.of_file(output, OTHER))
        file, before = None, []
        if os.path.lexists(output):
            file = files.enter_context(open_existing(output, options.resume))
            finished, checksums = batch_output.read_finished(job, settings, file)
            if finished:
                batch_output.check_finished(output, job, settings, load)
                return _report(options, finished, finished["completions"])
            before = batch_output.read_keys(file, output, checksums)
        elif options.resume:
            resuming.say_new("job", output)
        model = load()
        known = known_model(output, job, settings, model, is_new=file is None)
        items, bad_lines = _read_items(options, sampling, data, model)
        order = _order(items)
        skip = _skipped(before, order, output)
        # Made before anything is written, because what cannot fit is refused here.
        engine = _engine(options, sampling, model, items, skip, max_kv_bytes, make_engine)
        if file is None:
            batch_output.write_job(job, settings, known)
            file = files.enter_context(jsonl.open_alone(output, "xb", OTHER))
        if engine:
            _sample(options, engine, items, file, len(before), len(order))
        lines = batch_output.sorted_lines(output, order)
        finished = {"completions": len(order), "prompts": len(items), "bad_lines": bad_lines}
        if failed := batch_output.num_failed(lines):
            finished["failed"] = failed
        try:
            batch_output.write_finished(output, job, settings, known, finished, lines)
        finally:  # all is sampled, and reported, even where the disk is full now
            code = _report(options, finished, len(before), engine)
        return code


def _check(options: argparse.Namespace) -> int | None:
    """Checks the settings and the place of the output; returns the bytes of --max-kv-bytes."""
    for name, what in (("n", "completion"), ("max_new_tokens", "token"), ("max_rows", "row")):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise RefusedInputError(
                f"--{name.replace('_', '-')} is {value}; ask for at least 1 {what}"
            )
    if options.tree and options.chat:
        raise RefusedInputError(
            "--chat and --tree do not go together; write the texts of the tree as the chat "
            "template would"
        )
    check_file("--output", options.output)
    with batch_output.refusing():
        return options.max_kv_bytes and arguments.parse_bytes(options.max_kv_bytes)


def _settings(options: argparse.Namespace, sampling: dict[str, Any], data: bytes) -> dict[str, Any]:
    """The settings that decide the texts: the number of rows does not.

    What rows share changes the rounding, and so in bfloat16 and float16 the texts.
    """
    given = {
        name: getattr(options, name)
        for name in ("model", "n", "max_new_tokens", "seed", "tree", "chat", "dtype", "share")
    }
    stops = {"stop": options.stop, "include_stop": options.include_stop} if options.stop else {}
    if grammar := sampling.get("grammar"):
        sampling = {**sampling, "grammar": dataclasses.asdict(grammar)}
    adapter = {"adapter": options.adapter} if options.adapter else {}
    return {
        "input": jsonl.sha256(data),
        **given,
        **sampling,
        **stops,
        **adapter,
        **_scores(options),
    }


def _scores(options: argparse.Namespace) -> dict[str, Any]:
    """The log-probabilities that lines are to have beside that of the completion."""
    given = {"logprobs": options.logprobs, "top_logprobs": options.top_logprobs}
    return {name: value for name, value in given.items() if value}


_MAX_COMPLETIONS = 2**23
"""The most completions of a job, each of which is remembered until the end."""


def _read_items(
    options: argparse.Namespace, sampling: dict[str, Any], data: bytes, model: LoadedModel
) -> tuple[list[Item], list[dict[str, Any]]]:
    """The prompts of the input, and its bad lines, which are named on stderr."""
    items, bad_lines = read_input(data, model, options, _sampler(model, sampling))
    resuming.say_bad(options.input, bad_lines)
    if not items:
        raise RefusedInputError(
            f"no line of the input {options.input} can be run; give at least one such as "
            '{"prompt": "..."}'
        )
    if (completions := sum(item.n for item in items)) > _MAX_COMPLETIONS:
        raise RefusedInputError(
            f"the input {options.input} asks for {completions} completions; a job has at most "
            f"{_MAX_COMPLETIONS}: split it, and give each part a --seed of its own"
        )
    return items, bad_lines


def _sampler(model: LoadedModel, sampling: dict[str, Any]) -> Sampler:
    """The sampler of the job's lines that have no settings of their own."""
    return dataclasses.replace(default_sampler(model), **sampling)


def _order(items: Sequence[Item]) -> dict[Key, tuple[int, int]]:
    """The place of each completion of the job: its item's, and its number there."""
    return {
        (item.line, item.branch, index): (place, index)
        for place, item in enumerate(items)
        for index in range(item.n)
    }


def _skipped(
    before: Sequence[Key], order: Mapping[Key, tuple[int, int]], output: Path
) -> set[tuple[int, int]]:
    """The places of the completions that the output has."""
    for number, key in enumerate(before, 1):
        if key not in order:
            raise batch_output.damaged_line(output, number, "it is of no prompt of the input")
    return {order[key] for key in before}


def _engine(
    options: argparse.Namespace,
    sampling: dict[str, Any],
    model: LoadedModel,
    items: Sequence[Item],
    skip: set[tuple[int, int]],
    max_kv_bytes: int | None,
    make_engine: Callable[..., Any],
) -> Any:
    """Makes what samples the completions that are not to be skipped; None where none is left."""
    sampler = _sampler(model, sampling)
    warn_of_equal_texts((item.n, item.sampler or sampler) for item in items)
    if len(skip) == sum(item.n for item in items):
        return None
    # Here, because what replicas on other nodes log is not shown.
    warn_of_greedy(model, sampler)
    return make_engine(
        model,
        [Branch(item.tokens, n=item.n, sampler=item.sampler) for item in items],
        n=options.n,
        max_new_tokens=options.max_new_tokens,
        sampler=sampler,
        stop=options.stop,
        include_stop=options.include_stop,
        seed=options.seed,
        share=_SHARE[options.share],
        max_rows=options.max_rows,
        max_kv_bytes=max_kv_bytes,
        skip=skip,
        **_scores(options),
    )


def _sample(
    options: argparse.Namespace,
    engine: Any,
    items: Sequence[Item],
    file: BinaryIO,
    before: int,
    total: int,
) -> None:
    """Writes completions to the file as they finish; says first what was chosen for the run."""
    for note in engine.notes:
        print(f"jaxshare: {note}", file=sys.stderr)
    done, max_tokens = before, options.max_new_tokens
    at_most = (total - before) * max_tokens
    with progress.work("prefill") as work:

        def show(engine: Any) -> None:
            if engine.sampled_tokens:
                work.turn_to("decoding", at_most, "tokens")
                work.done = engine.sampled_tokens

        try:
            for completion in engine.stream(on_pass=show):
                jsonl.append(file, _result(completion, items, options), AGAIN)
                done += 1
                # A completion that stops early leaves less to do.
                at_most -= max_tokens - len(completion.tokens)
                work.total, work.note = at_most, f"{done} of {total} completions"
        except KeyboardInterrupt:
            work.close()
            print(
                f"{done} of {total} completions are in {options.output}; --resume goes on with "
                "the job",
                file=sys.stderr,
            )
            raise


def _result(completion: Any, items: Sequence[Item], options: argparse.Namespace) -> dict[str, Any]:
    """A line of the output."""
    item = items[completion.prompt]
    num_tokens = len(item.tokens) + len(completion.tokens)
    failed = completion.error
    error = type(failed).of(item.name, f"{num_tokens} tokens") if failed else None
    return {
        "id": item.id,
        "line": item.line,
        **({"branch": item.branch} if options.tree else {}),
        "index": completion.index,
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": str(completion.finish_reason),
        "logprob": round(completion.logprob, 4),
        **{name: getattr(completion, name) for name in _scores(options)},
        **({"error": str(error)} if error else {}),
    }


def _report(
    options: argparse.Namespace, finished: Mapping[str, Any], before: int, engine: Any = None
) -> int:
    """Prints the counts and costs of a job; returns its exit code."""
    tokens, passes = (engine.sampled_tokens, engine.passes) if engine else (0, 0)
    seconds, compile_seconds = (engine.seconds, engine.compile_seconds) if engine else (0.0, 0.0)
    kv_bytes = engine.kv_bytes if engine else 0
    speed = tokens / max(seconds, 1e-9)
    if engine:
        old = f" ({before} of them from before)" if before else ""
        print(
            f"{finished['completions']} completions{old} of {finished['prompts']} prompts; "
            f"{tokens} tokens in {passes} passes, {speed:,.0f} tokens/s after "
            f"{compile_seconds:.1f} s of compiling, {kv_bytes / 1e6:.2f} MB of keys and values",
            file=sys.stderr,
        )
    else:
        print(
            f"the job is complete: all {before} completions are in {options.output}",
            file=sys.stderr,
        )
    if bad_lines := finished["bad_lines"]:
        print(resuming.count_bad(options.input, bad_lines), file=sys.stderr)
    if options.json:
        report = {
            **finished,
            "tokens": tokens,
            "passes": passes,
            "seconds": seconds,
            "compile_seconds": compile_seconds,
            "tokens_per_second": speed,
            "kv_bytes": kv_bytes,
            "unique_prompt_tokens": engine.unique_tokens if engine else 0,
            "output": options.output,
            "resumed": before,
            "rows": engine.rows if engine else 0,
        }
        print(json.dumps(report))
    if failed := finished.get("failed"):
        print(
            f"jaxshare: error: the model's logits for {failed} of {finished['completions']} "
            f"completions are not numbers; their lines in {options.output} have the errors, and "
            "the others are complete",
            file=sys.stderr,
        )
    return _INCOMPLETE if failed or bad_lines else 0
