"""Batch jobs: completions of a file of prompts, written as they finish, and continued after a kill
with nothing lost or sampled twice.

    jaxshare batch MODEL --input prompts.jsonl --output out.jsonl --n 16

All prompts of the file are one run of the engine, so what several lines begin with is stored and
read once. A completion depends on the seed, its prompt and its number alone. That is why a job
needs no state but its own output: what stands there is skipped, the rest is sampled, and the texts
are those of an unbroken run. OUTPUT.job beside it keeps the settings, so that no other job is mixed
into it.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from jaxshare import models
from jaxshare.models import LoadedModel
from jaxshare.paths import check_file
from jaxshare.serving import jsonl
from jaxshare.serving.branches.batch_input import Item, read_input
from jaxshare.serving.branches.data_parallel import branches
from jaxshare.serving.branches.prompt_tree import Branch
from jaxshare.serving.cluster import process_mesh, ray_pool
from jaxshare.serving.cluster.model_spec import ModelSpec
from jaxshare.serving.cluster.shards import Shards
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.inputs import default_sampler, warn_of_equal_texts

_FORMAT = "jaxshare batch job 2"
_SHARE = {"auto": None, "always": True, "never": False}
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{unit}b": 1000**i for i, unit in enumerate("kmgt", 1)},
    **{f"{unit}ib": 1024**i for i, unit in enumerate("kmgt", 1)},
}
_RESULT = {"line": int, "index": int, "text": str, "tokens": list, "reason": str, "logprob": float}
"""What every line of the output has, beside the id."""
_OTHER, _AGAIN = "give another --output", "--resume goes on with the job"
_BAD_LINES = 3
"""The exit code when some lines could not be read; the others have run."""

_Key = tuple[int, tuple[int, ...], int]
"""A completion: the line of its prompt, the path of its branch in that line's tree, its number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `jaxshare batch`, without those of sampling."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder or hub id, or `embedded` for the model that comes with jaxshare",
    )
    parser.add_argument(
        "--input",
        required=True,
        metavar="FILE",
        help='JSON lines: {"prompt": "..."}, {"messages": [...]} or {"tokens": '
        '[...]}, with an "id" and an "n" of its own if wanted',
    )
    parser.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="JSON lines, one a completion, written as they finish and put into "
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
        "--max-new-tokens", type=int, default=64, help="most tokens of a completion (default 64)"
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
        help="keep common prefixes once for all: where it pays (default), always or never",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the whole job; no two completions, nor two seeds, share random "
        "numbers (default 0)",
    )
    process_mesh.add_arguments(parser)
    ray_pool.add_arguments(parser)
    parser.add_argument(
        "--resume", action="store_true", help="go on with the job that has begun the output"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout at the end")


def run(options: argparse.Namespace, sampling: dict[str, Any]) -> int:
    """Runs a job, here or on a fleet; see `run_job`."""
    if found := ray_pool.of_options(options):
        return _run_on(found, options, sampling)
    mesh = process_mesh.mesh_of(options)

    def load() -> LoadedModel:
        return models.load(options.model, dtype=options.dtype, mesh=mesh)

    return run_job(options, sampling, load, branches)


def _run_on(found: ray_pool.RayPool, options: argparse.Namespace, sampling: dict[str, Any]) -> int:
    """Runs a job on replicas, which load the model themselves; what is read here has no
    parameters."""
    node = ModelSpec.of(options)
    with contextlib.ExitStack() as running:

        def engine(model: LoadedModel, *prompts: Any, **settings: Any) -> Shards:
            return Shards(running.enter_context(found), node.load, model, *prompts, **settings)

        return run_job(options, sampling, node.outline, engine)


def run_job(
    options: argparse.Namespace,
    sampling: dict[str, Any],
    load: Callable[[], LoadedModel],
    engine: Callable[..., Any],
) -> int:
    """Runs a job, or what is left of it.

    Args:
      options: what `add_arguments` has asked for, and `dtype`.
      sampling: fields of `Sampler` that were given; the checkpoint's own stand for the rest.
      load: gives the model. What can be wrong without it is found before.
      engine: makes what samples, as `Branches` does.

    Returns:
      0, or 3 if lines of the input are bad: they are named on stderr, and the others have run.

    Raises:
      ValueError: wrong settings, files that cannot be read or written, an output that is there
        already or belongs to another job, or an input without a line that can be run.
    """
    max_kv_bytes = _check(options)
    data = _read(options.input, "input")
    output, job = Path(options.output), Path(f"{options.output}.job")
    settings = _settings(options, sampling, data)
    with contextlib.ExitStack() as files:
        file, before = None, []
        if os.path.lexists(output):
            if not options.resume:
                raise ValueError(
                    f"the output {output} exists; --resume goes on with the job that wrote it, or "
                    "give another --output"
                )
            file = files.enter_context(jsonl.open_alone(output, "r+b", _OTHER))
            if finished := _finished(job, settings, file):
                return _end(options, finished, finished["completions"])
            before = _read_results(file, output)

        model = load()
        items, bad_lines = read_input(data, model, options)
        for bad in bad_lines:
            print(f"line {bad['line']}: {bad['error']}", file=sys.stderr)
        if not items:
            raise ValueError(
                f"no line of the input {options.input} can be run; give at least one such as "
                '{"prompt": "..."}'
            )
        places = {
            (item.line, item.branch, index): (place, index)
            for place, item in enumerate(items)
            for index in range(item.n)
        }
        for number, key in enumerate(before, 1):
            if key not in places:
                raise _damaged(output, number, "it is of no prompt of the input")
        branches, sampler = None, dataclasses.replace(default_sampler(model), **sampling)
        warn_of_equal_texts(sampler, max(item.n for item in items))
        # made before anything is written, because what cannot fit is refused here
        if len(before) < len(places):
            # here, because what replicas on other nodes log is not shown
            warn_of_greedy(model, sampler)
            branches = engine(
                model,
                [Branch(item.tokens, n=item.n) for item in items],
                n=options.n,
                max_new_tokens=options.max_new_tokens,
                sampler=sampler,
                seed=options.seed,
                share=_SHARE[options.share],
                max_rows=options.max_rows,
                max_kv_bytes=max_kv_bytes,
                skip={places[key] for key in before},
            )
        if file is None:
            jsonl.write(
                job,
                [
                    jsonl.line(
                        {"format": _FORMAT, "settings": settings, "finished": None, "output": None}
                    )
                ],
                _AGAIN,
            )
            file = files.enter_context(jsonl.open_alone(output, "xb", _OTHER))
        if branches:
            for note in branches.notes:
                print(f"jaxshare: {note}", file=sys.stderr)
            _sample(options, branches, items, file, len(before), len(places))
        lines = _in_order(output, places)
        finished = {"completions": len(places), "prompts": len(items), "bad_lines": bad_lines}
        done = {
            "format": _FORMAT,
            "settings": settings,
            "finished": finished,
            "output": jsonl.sha256(b"".join(lines)),
        }
        try:
            jsonl.write(output, lines, _AGAIN)
            jsonl.write(job, [jsonl.line(done)], _AGAIN)
        finally:  # all is sampled, and said to be, even where the disk is full now
            code = _end(options, finished, len(before), branches)
        return code


def _check(options: argparse.Namespace) -> int | None:
    """Finds what is wrong with the numbers; the bytes of --max-kv-bytes."""
    for name, what in (("n", "completion"), ("max_new_tokens", "token"), ("max_rows", "row")):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; ask for at least 1 {what}")
    if options.tree and options.chat:
        raise ValueError(
            "--chat and --tree do not go together; write the texts of the tree as the chat "
            "template would"
        )
    check_file("--output", options.output)
    return None if options.max_kv_bytes is None else parse_bytes(options.max_kv_bytes)


def parse_bytes(text: str) -> int:
    """Bytes, from a number with or without a unit: 2e9, 2GB (powers of 1000), 512MiB (powers of
    1024).

    Raises:
      ValueError: anything else, and less than one byte.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\+?\d{1,2})?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _UNITS or (size := int(float(match[1]) * _UNITS[match[2]])) < 1:
        raise ValueError(
            f"--max-kv-bytes is {text!r}; it must be a number of bytes such as 2e9, 2GB or 512MiB"
        )
    return size


def _settings(options: argparse.Namespace, sampling: dict[str, Any], data: bytes) -> dict[str, Any]:
    """What decides the texts. How many rows run at once, and what they share, does not."""
    asked = {
        name: getattr(options, name)
        for name in ("model", "n", "max_new_tokens", "seed", "tree", "chat", "dtype")
    }
    return {"input": jsonl.sha256(data), **asked, **sampling}


# The output, and the job beside it.


def _finished(job: Path, settings: Mapping[str, Any], file: BinaryIO) -> dict[str, Any] | None:
    """What the job came to, if it did and its output has not been touched since. Refuses one whose
    texts would be others."""
    output, do = file.name, _OTHER
    try:
        known = json.loads(job.read_bytes())
        then, finished, digest = {**known["settings"]}, known["finished"], known["output"]
        if known["format"] != _FORMAT or (
            finished and {*finished} != {"completions", "prompts", "bad_lines"}
        ):
            raise ValueError(f"its format is not {_FORMAT!r}")
    except FileNotFoundError as error:
        raise ValueError(
            f"there is no {job}, so nothing says which job wrote {output}; {do}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{job} cannot be read or is damaged ({type(error).__name__}: {error}); {do}"
        ) from error
    jsonl.check_settings(f"the job of {output} began", then, settings, do)
    unchanged = digest == jsonl.sha256(file.read())
    file.seek(0)
    return finished if unchanged else None


def _read_results(file: BinaryIO, output: Path) -> list[_Key]:
    """The completions that are there already. A last line that was being written when its writer
    was killed is cut off."""
    keys: dict[_Key, int] = {}
    for number, line in enumerate(jsonl.lines_of(file), 1):
        first = keys.setdefault(_key(line, number, output), number)
        if first != number:
            raise _damaged(output, number, f"it repeats line {first}")
    return [*keys]


def _key(line: bytes, number: int, output: Path) -> _Key:
    try:
        result = json.loads(line)
        if wrong := [name for name, kind in _RESULT.items() if type(result[name]) is not kind]:
            raise TypeError(f"its {wrong[0]} is {json.dumps(result[wrong[0]])[:40]}")
        return result["line"], tuple(map(int, result.get("branch", ()))), result["index"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(output, number, f"{type(error).__name__}: {error}") from error


def _damaged(output: Path, number: int, reason: str) -> ValueError:
    return ValueError(
        f"line {number} of the output {output} is damaged ({reason}); take that line out, and "
        "--resume samples it again"
    )


def _in_order(output: Path, places: Mapping[_Key, tuple[int, int]]) -> list[bytes]:
    """The lines of the output in the order of the input."""
    lines = _read(output, "output").splitlines(keepends=True)
    return sorted(lines, key=lambda line: places[_key(line, 0, output)])


def _read(path: str | Path, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"the {what} {path} cannot be read ({error}); give a file of JSON lines"
        ) from error


# The run.


def _sample(
    options: argparse.Namespace,
    engine: Any,
    items: Sequence[Item],
    file: BinaryIO,
    before: int,
    wanted: int,
) -> None:
    """Writes completions to the file as they finish."""
    done, most = before, options.max_new_tokens
    with tqdm(
        total=(wanted - before) * most, unit=" tokens", leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        try:
            for completion in engine.stream(on_pass=lambda e: bar.update(e.sampled_tokens - bar.n)):
                item = items[completion.prompt]
                branch = {"branch": item.branch} if options.tree else {}
                jsonl.append(
                    file,
                    {
                        "id": item.id,
                        "line": item.line,
                        **branch,
                        "index": completion.index,
                        "text": completion.text,
                        "tokens": completion.tokens,
                        "reason": completion.reason,
                        "logprob": round(completion.logprob, 4),
                    },
                    _AGAIN,
                )
                done += 1
                bar.total -= most - len(completion.tokens)  # what stops early leaves less to do
                bar.set_postfix_str(f"{done}/{wanted} completions", refresh=False)
        except KeyboardInterrupt:
            bar.close()
            print(
                f"{done} of {wanted} completions are in {options.output}; --resume goes on with "
                "the job",
                file=sys.stderr,
            )
            raise


def _end(
    options: argparse.Namespace, finished: Mapping[str, Any], before: int, engine: Any = None
) -> int:
    """Says what the job came to; its exit code."""
    tokens, passes, seconds, kv_bytes, unique, compiling = (
        (
            engine.sampled_tokens,
            engine.passes,
            engine.seconds,
            engine.kv_bytes,
            engine.unique_tokens,
            engine.compile_seconds,
        )
        if engine
        else (0, 0, 0.0, 0, 0, 0.0)
    )
    speed = tokens / max(seconds, 1e-9)
    if engine:
        old = f" ({before} of them from before)" if before else ""
        print(
            f"{finished['completions']} completions{old} of {finished['prompts']} prompts; "
            f"{tokens} tokens in {passes} passes, {speed:,.0f} tokens/s after {compiling:.1f} s of "
            f"compiling, {kv_bytes / 1e6:.2f} MB of keys and values",
            file=sys.stderr,
        )
    else:
        print(
            f"the job is complete: all {before} completions are in {options.output}",
            file=sys.stderr,
        )
    if options.json:
        print(
            json.dumps(
                {
                    **finished,
                    "tokens": tokens,
                    "passes": passes,
                    "seconds": seconds,
                    "compile_seconds": compiling,
                    "tokens_per_second": speed,
                    "kv_bytes": kv_bytes,
                    "unique_prompt_tokens": unique,
                    "output": options.output,
                    "resumed": before,
                    "rows": engine.rows if engine else 0,
                }
            )
        )
    return _BAD_LINES if finished["bad_lines"] else 0
