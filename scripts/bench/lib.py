"""The common parts of benchmarks: sides in turn, goals, tables, and facts of the machine."""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]

# Not as a part of jaxshare, which imports JAX: gpu_compile.py has to set the environment before.
_spec = importlib.util.spec_from_file_location("jaxshare_paths", ROOT / "jaxshare" / "paths.py")
assert _spec and _spec.loader
paths = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(paths)


# Instructions that decide how fast low-precision products are, as /proc/cpuinfo names them.
_CPU_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with the arguments, and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def numbers(self, option: str, text: str, such_as: str) -> tuple[int, ...]:
        """Different numbers from 1 up with commas between them; ends the program where `text`,
        which `option` was given, is not that."""
        found = text.split(",")
        if not all(n.isascii() and n.isdigit() and int(n) for n in found) or len(
            {int(n) for n in found}
        ) < len(found):
            self.error(
                f"{option} is {text!r}, but it must be different numbers from 1 up with commas "
                f"between, such as {such_as}"
            )
        return tuple(map(int, found))

    def at_least(self, least: float, **values: float | None) -> None:
        """Ends the program where one of the values, by the names of their options, is below `least`;
        None is what was not given."""
        for name, value in values.items():
            if value is not None and not value >= least:
                option = name.replace("_", "-")
                self.error(f"--{option} is {value}, but it must be at least {least}")

    def add_model(self) -> None:
        """Adds --model, by default the embedded one."""
        self.add_argument(
            "--model",
            default="embedded",
            help="folder, GGUF file or hub id (default: the model that comes with jaxshare)",
        )

    def reporting(self) -> None:
        """Adds what all benchmarks have: how the result is to be given."""
        self.add_argument("--json", action="store_true", help="print one JSON object")
        self.add_argument(
            "--output", type=Path, metavar="FILE", help="write the JSON object to this file too"
        )

    def some_of(self, option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
        """Different ones of these names with commas between; ends the program where `text`, which
        `option` was given, is not that."""
        found = tuple(text.split(","))
        if wrong := [
            name for i, name in enumerate(found) if name not in known or name in found[:i]
        ]:
            self.error(
                f"{option} has {wrong[0]!r}, but it must be some of {', '.join(known)}, each once"
            )
        return found

    def add_models(self, known: Sequence[str]) -> None:
        """Adds --models, some of those of a benchmark; see `chosen_models`."""
        self.add_argument(
            "--models", metavar="M,M", help=f"of {','.join(known)} (default both; quick embedded)"
        )

    def chosen_models(self, given: argparse.Namespace, known: Sequence[str]) -> tuple[str, ...]:
        """The models that --models names: by default all, with --quick the embedded one."""
        default = "embedded" if given.quick else ",".join(known)
        return self.some_of("--models", given.models or default, known)

    def check_output(self, output: Path | None) -> None:
        """Ends the program where --output, if it was given, names nothing that can be written."""
        if output is not None and (why := paths.unwritable_file(output)):
            self.error(
                f"--output is {output}, but it must name a file in a folder that exists and can be "
                f"written: {why}"
            )

    def check_folder(self, option: str, folder: Path | None) -> None:
        """Ends the program where a folder for results, if `option` named one, cannot be written to
        or made."""
        if folder is not None and (why := paths.unwritable_folder(folder)):
            self.error(f"{option} is {folder}, but {why}; name a folder that can be written")


@dataclasses.dataclass(frozen=True)
class Goal:
    """`measured` is to be at least `goal`, or with `at_most` at most; None is what was not
    measured, and neither met nor missed."""

    name: str
    measured: float | None
    goal: float
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured <= self.goal if self.at_most else self.measured >= self.goal

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "measured": self.measured,
            "goal": self.goal,
            "at_most": self.at_most,
            "met": self.met,
        }


def goal_table(goals: Sequence[Goal]) -> str:
    """The goals as text, one a line."""
    return table(
        ("goal", "measured", "wanted", "met"),
        [
            (
                g.name,
                "" if g.measured is None else f"{g.measured:.2f}",
                f"{'at most' if g.at_most else 'at least'} {g.goal:.2f}",
                {True: "yes", False: "NO", None: "not measured"}[g.met],
            )
            for g in goals
        ],
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first set to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            [
                cells[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for cells in (header, ["-" * w for w in widths], *rows)
    )


def alternate[T](sides: Mapping[T, Callable[[], float]], rounds: int) -> dict[T, list[float]]:
    """Measures every side once a round, one after the other, each round beginning with another
    side.

    What slows the machine down for a while then slows down all sides, and none is always the one
    that comes after a certain other.

    Args:
      sides: for each side what runs it once and returns its seconds.
      rounds: how many.

    Returns:
      For each side its seconds in every round.
    """
    names = list(sides)
    times: dict[T, list[float]] = {name: [] for name in names}
    for r in range(rounds):
        first = r % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(sides[name]())
    return times


_INTERVAL = 60.0
"""The seconds between two lines where there is no terminal; that of `jaxshare.progress`."""


class _LinesAMinute:
    """Steps as lines of a log."""

    def __init__(self, steps: int):
        self._steps, self._done, self._last = steps, 0, time.monotonic()

    def say(self, what: str) -> None:
        """Names the next step; those that were named before it are done."""
        if (now := time.monotonic()) - self._last >= _INTERVAL:
            self._last = now
            print(f"{self._done} of {self._steps} steps, {what}", file=sys.stderr, flush=True)
        self._done += 1


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar of `steps` steps: call the given function with the name of the next step.

    Where stderr is no terminal, such as in a log, a line a minute has it, as in the commands.
    """
    if not sys.stderr.isatty():
        yield _LinesAMinute(steps).say
        return
    with tqdm(total=steps, leave=False, file=sys.stderr) as bar:

        def say(what: str) -> None:
            bar.update(bool(bar.desc))  # what was said before is done
            bar.set_description(what)

        yield say


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """One side's times divided by another's, round by round: the median, the lowest and the
    highest."""
    of_rounds = [a / b for a, b in zip(above, below, strict=True)]
    return {
        "median": statistics.median(of_rounds),
        "lowest": min(of_rounds),
        "highest": max(of_rounds),
    }


def write_checkpoint(folder: Path, model: Mapping[str, Any], seed: int) -> int:
    """Writes a Llama with the config.json `model`, random bfloat16 weights and an untied head, as a
    Hugging Face folder; returns the number of parameters."""
    hidden, mlp, vocab = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    q, kv = (
        model["num_attention_heads"] * model["head_dim"],
        model["num_key_value_heads"] * model["head_dim"],
    )
    shapes = {
        "model.embed_tokens": (vocab, hidden),
        "model.norm": (hidden,),
        "lm_head": (vocab, hidden),
    }
    for i in range(model["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{i}.{name}": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (q, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, q),
                "mlp.gate_proj": (mlp, hidden),
                "mlp.up_proj": (mlp, hidden),
                "mlp.down_proj": (hidden, mlp),
            }.items()
        }
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()}
    return write_random(folder, model, shapes, seed)


def write_random(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], seed: int
) -> int:
    """Writes tensors of these shapes, matrices random and vectors of ones, in bfloat16, and their
    config.json, as a Hugging Face folder; returns the number of parameters."""
    rng = np.random.default_rng(seed)
    tensors = {
        name: (
            np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape, np.float32) * 0.02
        ).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    return sum(t.size for t in tensors.values())


def data_file(name: str) -> Path:
    """The place of a file of data: in $JAXSHARE_DATA, or in ../shared/data of this checkout."""
    return Path(os.environ.get("JAXSHARE_DATA") or ROOT.parent / "shared" / "data") / name


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """The machine, and its load now: near 0 for a measurement to be trusted."""
    info = _cpu_info()
    flags = info.get("flags", info.get("Features", "")).split()
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "features": [name for name in _CPU_FEATURES if name in flags],
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "os": _system(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of Python and the named packages, as they run here."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def command(arguments: Sequence[str]) -> str:
    """The command line of a run, with `arguments` = sys.argv, fit to be published.

    A path that is not inside this repository says something about a machine, not about the run: its
    last component stays.
    """
    program = Path(arguments[0]).resolve()
    if program.is_relative_to(ROOT):
        module = ".".join(program.relative_to(ROOT).with_suffix("").parts)
        return shlex.join(["python", "-m", module, *map(_published, arguments[1:])])
    return shlex.join(["python", *map(_published, arguments)])


def own_command(file: str, arguments: Sequence[str] | None) -> str:
    """The command line of a program, fit to be published.

    Args:
      file: the program's `__file__`.
      arguments: that its `main` was given; None for those of the process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    return command([str(Path(file).resolve()), *given])


def finish(
    report: Mapping[str, Any],
    text: str,
    goals: Sequence[Goal],
    *,
    as_json: bool,
    output: Path | None,
) -> None:
    """Prints a report, its goals last, as text or as one JSON object; writes the JSON object to
    `output` too. Ends the program with code 1 where that cannot be written after all: what was
    measured has been printed."""
    report = {**report, "goals": [goal.as_json() for goal in goals]}
    encoded = json.dumps(report, indent=2)
    closing = goal_table(goals) if goals else "No goal is set for what was measured."
    print(encoded if as_json else f"{text}\n\n{closing}", flush=True)
    if output is not None:
        try:
            with paths.whole_file(output) as file:
                file.write(encoded + "\n")
        except OSError as error:
            print(
                f"--output: {output} cannot be written ({paths.reason(error)}); what was measured is on "
                "stdout",
                file=sys.stderr,
            )
            raise SystemExit(1) from error


def _published(argument: str) -> str:
    option, equals, value = (
        argument.partition("=") if argument.startswith("--") else ("", "", argument)
    )
    path = Path(value)
    if path.is_absolute():
        # Not resolved: an environment's python is a link to a place outside.
        value = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return option + equals + value


def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; nothing where there is no such file."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    return {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in first.splitlines())
    }


def _system() -> str:
    kernel = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (OSError, KeyError):
        return kernel
