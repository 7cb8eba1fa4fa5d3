"""The command `jaxshare convert`: a model in Orbax form, or back in Hugging Face form; or a quantised
one."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxshare.models import orbax_io
from jaxshare.models.config import ModelConfig
from jaxshare.models.gguf import file as gguf_file
from jaxshare.models.gguf.converting import convert_gguf
from jaxshare.models.loading import outline
from jaxshare.models.model_folder import check_folders
from jaxshare.models.quantisation.converting import (
    FORMS,
    HUGGING_FACE,
    ORBAX,
    check_plain,
    convert_quantised,
)
from jaxshare.models.quantisation.making import LEAST_TOKENS, Making, Text
from jaxshare.models.quantisation.rounding import MADE, Rounding
from jaxshare.models.sources import local_folder
from jaxshare.paths import check_folder
from jaxshare.serving.cli import arguments
from jaxshare.serving.locks import OutputLock

_TOKENS = 8192
_OF_QUANTISED = ("group", "zeros", "text", "tokens", "form", "embeddings")
"""Options that are for quantised models alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare convert`."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="folder in Hugging Face form or in the form that this command writes, a GGUF file, or "
        "embedded",
    )
    parser.add_argument(
        "target", metavar="TARGET", help="folder to write, which does not exist yet"
    )
    group = parser.add_argument_group("quantised models")
    group.add_argument("--quantize", choices=MADE, help="the codes of matrices")
    group.add_argument(
        "--group",
        type=int,
        metavar="N",
        help="the most inputs that share a scale; matrices whose inputs no size from 16 to N divides "
        "stay plain (default: 64 for int4, else all of a row)",
    )
    group.add_argument(
        "--zeros", action="store_true", help="int4: each group has a zero of its own, too"
    )
    group.add_argument(
        "--text",
        metavar="FILE",
        help="choose scales by what layers get on this text, and report the loss in perplexity on "
        f"its last fifth; at least {LEAST_TOKENS} tokens",
    )
    group.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"the most tokens of the text to choose by, and to measure on (default: {_TOKENS})",
    )
    group.add_argument(
        "--form",
        choices=FORMS,
        help=f"{HUGGING_FACE}: safetensors in the form of compressed-tensors, which transformers and "
        f"vLLM read (default); or {ORBAX}",
    )
    group.add_argument(
        "--embeddings",
        choices=("plain", "int8"),
        help="the embedding and the head (default: int8 in Orbax form with int8 or int4; else plain, "
        "since few programs read quantised ones)",
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Runs `jaxshare convert`.

    Raises:
      FileNotFoundError, ValueError: as `orbax_io.convert` and `convert_quantised`, or options that do
        not go together.
    """
    if options.quantize is None:
        for name in _OF_QUANTISED:
            if getattr(options, name) not in (None, False):
                raise ValueError(
                    f"--{name} is for quantised models: give --quantize as well, one of "
                    f"{', '.join(MADE)}"
                )
    if not Path(options.target).exists():
        check_folder("TARGET", options.target)
    # beside the folder, which takes its name when all is written
    with OutputLock.of_file(options.target, "give another TARGET"):
        written = _written(local_folder(options.source), Path(options.target), options)
    form = "Orbax" if written["form"] == ORBAX else "Hugging Face"
    print(
        f"{options.target}: {written['tensors']} tensors, {written['bytes'] / 1e6:,.1f} MB, in "
        f"{form} form",
        file=sys.stderr,
    )
    if options.json:
        print(json.dumps({**written, "folder": options.target}))
    return 0


def _written(source: Path, target: Path, options: argparse.Namespace) -> dict[str, Any]:
    is_gguf = not orbax_io.is_checkpoint(source) and gguf_file.find(source) is not None
    if options.quantize is None:
        return (convert_gguf if is_gguf else orbax_io.convert)(source, target)
    if is_gguf:
        raise ValueError(
            f"{source} is in GGUF, of which --quantize makes nothing: convert it without --quantize "
            "first, and if its matrices are plain, quantise what that writes"
        )
    return _quantise(source, target, options)


def _quantise(source: Path, target: Path, options: argparse.Namespace) -> dict[str, Any]:
    form = options.form or HUGGING_FACE
    rounding = Rounding.of(options.quantize, options.group, zeros=options.zeros)
    embeddings = options.embeddings
    if embeddings is None:
        embeddings = "int8" if form == ORBAX and options.quantize != "fp8" else "plain"
    if embeddings == "int8" and options.quantize == "fp8" and form == HUGGING_FACE:
        raise ValueError("--embeddings int8 cannot be written beside fp8; give --embeddings plain")
    making = Making(rounding, Rounding.of("int8") if embeddings == "int8" else None)
    check_folders(source, target)
    check_plain(source)
    written = convert_quantised(source, target, making, form, _text(source, options))
    _report(written)
    return written


def _text(source: Path, options: argparse.Namespace) -> Text | None:
    if options.text is None:
        if options.tokens is not None:
            raise ValueError("--tokens is of a text: give --text as well")
        print(
            "no --text: scales are chosen by the matrices alone, and the loss is not measured",
            file=sys.stderr,
        )
        return None
    limit = _TOKENS if options.tokens is None else options.tokens
    if limit < 1:
        raise ValueError(f"--tokens is {limit}, but must be positive")
    try:
        text = Path(options.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {options.text} cannot be read as UTF-8 ({error})") from error
    tokenizer = outline(source).tokenizer
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer to read --text with; do without --text")
    tokens: Any = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    before: Any = tokenizer.encode("")
    return Text.of(tokens, before, ModelConfig.from_json(source), limit)


def _report(written: dict[str, Any]) -> None:
    """Says what was done, and what it costs."""
    lines = [
        f"{written['matrices']} matrices in {written['quantize']}, {written['bits']} bits for each "
        "number of the model"
    ]
    if written["plain"]:
        lines.append(
            f"{len(written['plain'])} matrices stay plain, because no group divides their inputs"
        )
    if (found := written["perplexity"]) is not None:
        lines.append(
            f"perplexity of {found['tokens']} held-out tokens: {found['before']:.4f} before, "
            f"{found['after']:.4f} after ({found['change']:+.2%})"
        )
    print("\n".join(lines), file=sys.stderr)
