"""The command `jaxshare doctor`."""

import argparse
import dataclasses
import json
import sys
import textwrap
from typing import Any

import jax.numpy as jnp

from jaxshare.models import EMBEDDED, ModelConfig, load
from jaxshare.models.sources import described
from jaxshare.serving.cli import arguments
from jaxshare.serving.tuning.diagnosis import EXTRAS, LLAMA_8B, Diagnosis, diagnose

_WIDTH = 100
_INDENT = 18
DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of a cache that can be asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare doctor`."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder, GGUF file or hub id of a model whose attention the backends are asked for; its weights "
        "are not read (default: the shape of Llama 3.1 8B)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the cache (default: the model's own, or bfloat16)"
    )
    parser.add_argument(
        "--compute",
        action="store_true",
        help="also compute on this device, and compare: attention of each backend with the "
        "reference, and a text and a session of workers of the model (default: the embedded one) "
        "with one pass over each; about half a minute",
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Prints what there is and what to mend; returns 1 if there is something to mend.

    Raises:
      ValueError: a config.json that is not understood, or with --compute weights that do not fit it, or no
        tokenizer.
      FileNotFoundError: no such model.
    """
    model = described(options.model) if options.model else None
    own = model.dtype_name if model and model.dtype_name in DTYPES else DTYPES[0]
    dtype = jnp.dtype(options.dtype or own)
    found = diagnose(model.config if model else None, dtype)
    if options.compute:
        found = _computed(found, options.model, model.config if model else LLAMA_8B, dtype)
    if options.json:
        print(json.dumps(found.to_json()))
    else:
        _show(found)
    return 1 if found.problems else 0


def _computed(
    found: Diagnosis, model: str | None, config: ModelConfig, dtype: jnp.dtype
) -> Diagnosis:
    """The diagnosis with what this device computes."""
    from jaxshare.serving.cli.trial import problem_of, trials

    tried = trials(load(model or EMBEDDED), config, dtype)
    wrong = [problem_of(trial) for trial in tried if not trial.is_right]
    return dataclasses.replace(found, trials=tried, problems=[*found.problems, *wrong])


def _show(found: Diagnosis) -> None:
    versions = found.versions
    _say("jaxshare", f"{versions['jaxshare']}, Python {versions['python']}, {versions['system']}")
    _say("packages", ", ".join(f"{p.name} {p.version or 'MISSING'}" for p in found.packages))
    for device in found.devices:
        memory = f", {_size(device['bytes'])} each" if device["bytes"] else ""
        _say("devices", f"{device['count']} x {device['kind']} ({device['platform']}){memory}")
    _say("CPU kernels", found.processor)
    _say("host memory", f"{_size(found.free_host_bytes)} free")
    _say("attention", f"{found.backend or 'no backend'} ({found.shape})")
    for check in found.backends:
        if check.reason is not None:
            _say("", f"not {check.name}: {check.reason}")
    for trial in found.trials:
        outcome = "right" if trial.is_right else "WRONG" if trial.failure is None else "failed"
        off = "" if trial.error is None else f" (off by {trial.error:.2g} of {trial.allowed:.2g})"
        _say("computed" if trial is found.trials[0] else "", f"{outcome}: {trial.name}{off}")
    for purpose, folder in found.folders.items():
        held = f"{folder['path']} holds {_size(folder['bytes'])}" if folder["path"] else "off"
        _say(purpose, held)
    for extra, packages in found.extras.items():
        missing = [package.name for package in packages if package.version is None]
        state = f"no: pip install 'jaxshare[{extra}]'" if missing else "installed"
        _say("extras" if extra == next(iter(found.extras)) else "", f"{EXTRAS[extra]}: {state}")
    for name, value in found.variables.items():
        _say("environment", f"{name}={value}")
    print()
    if not found.problems:
        print("nothing is to be mended")
    for problem in found.problems:
        print(textwrap.fill(problem, _WIDTH, initial_indent="to mend: ", subsequent_indent="  "))
    sys.stdout.flush()


def _say(name: str, text: str) -> None:
    print(
        textwrap.fill(
            text,
            _WIDTH,
            initial_indent=f"{name:{_INDENT}}",
            subsequent_indent=" " * _INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _size(number: Any) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return ""
