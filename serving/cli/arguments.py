"""Arguments that several commands share, and how their texts are read."""

import argparse
import pkgutil
import re
import sys
from typing import TYPE_CHECKING, Any

from jaxshare import models
from jaxshare.decoding.grammar import Grammar
from jaxshare.decoding.logprobs import PROCESSED, RAW
from jaxshare.decoding.sampling_params import Sampler
from jaxshare.models import LoadedModel
from jaxshare.quantised_cache import APPROXIMATIONS
from jaxshare.serving.chat_template import read_chat_template, with_chat_template
from jaxshare.serving.cluster.model_spec import AdapterFolders

if TYPE_CHECKING:
    from jax.sharding import Mesh

_MAX_TEXT = 2**26
"""The most characters of a prompt or a problem that are read."""
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{unit}b": 1000**i for i, unit in enumerate("kmgt", 1)},
    **{f"{unit}ib": 1024**i for i, unit in enumerate("kmgt", 1)},
}


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder, GGUF file or hub id, or `embedded` for the model that comes with jaxshare",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds --dtype and --approximate-kv."""
    parser.add_argument(
        "--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's own)"
    )
    parser.add_argument(
        "--approximate-kv",
        choices=APPROXIMATIONS,
        help="keep keys and values as codes of 8 bits with a scale for each token and kv head, in "
        "about half the memory of bfloat16; results are then approximate (default: exact)",
    )


def add_adapter(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Adds --adapter and, where requests name adapters, the room for them."""
    parser.add_argument(
        "--adapter",
        action="append",
        metavar="NAME=FOLDER",
        help="a LoRA adapter in the form of PEFT, "
        + ("which requests name as their model; may be given several times" * several)
        + ("with which all is computed" * (not several)),
    )
    if several:
        parser.add_argument(
            "--max-adapters",
            type=int,
            metavar="N",
            help="adapters that there is room for (default: as many as are given)",
        )
        parser.add_argument(
            "--max-adapter-rank",
            type=int,
            metavar="R",
            help="the largest rank that fits (default: the largest that is given, or 16)",
        )


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    """Adds --chat-template."""
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="the Jinja template that chats are written with (default: the checkpoint's own)",
    )


def load_model(
    options: argparse.Namespace, mesh: "Mesh | None" = None, *, several: bool = False
) -> LoadedModel:
    """Loads the model that the options of `add_model` and `add_dtype` name, onto a mesh if there is
    one, with the adapters of `add_adapter`, of which there may be `several` for requests to name,
    and the template of `add_chat_template`."""
    adapters = AdapterFolders.of(options, several=several)
    template = read_chat_template(getattr(options, "chat_template", None))
    how = {"dtype": options.dtype, "approximate_kv": options.approximate_kv}
    model = models.load(options.model, mesh=mesh, **how)
    return adapters.beside(model if template is None else with_chat_template(model, template))


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds --json."""
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, everything else on stderr"
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds --temperature, --top-k, --top-p, --min-p, other sampling settings, --dtype,
    --approximate-kv and --adapter."""
    parser.add_argument(
        "--temperature",
        type=float,
        help="0 takes the most likely token (default: the checkpoint's own)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        help="keep the k most likely tokens; 0 keeps all (default: the checkpoint's own)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        help="keep the most likely tokens of this total probability (default: the checkpoint's "
        "own)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        help="keep tokens of at least this probability, as a part of the most likely token's "
        "(default: the checkpoint's own)",
    )
    for name, kind, text in _SETTINGS:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, help=f"{text} (default: the checkpoint's own)"
        )
    parser.add_argument(
        "--processors-from",
        metavar="MODULE",
        help="a Python module to import, which registers logits processors",
    )
    parser.add_argument(
        "--processor",
        action="append",
        metavar="NAME[,PARAMETER=NUMBER...]",
        help="a registered logits processor; several are applied in the given order",
    )
    add_dtype(parser)
    add_adapter(parser)


_SETTINGS = (
    ("typical_p", float, "keep tokens of about the expected information, of this probability"),
    ("repetition_penalty", float, "divides the logits of tokens of the text so far; 1 for none"),
    ("presence_penalty", float, "subtracted from the logits of tokens that were sampled"),
    ("frequency_penalty", float, "the same for each time that a token was sampled"),
    ("no_repeat_ngram_size", int, "no so many tokens in a row come twice; 0 allows it"),
    ("min_tokens", int, "tokens that are sampled before a stop token can be"),
)
"""Names of sampling settings, their types, and what they do."""


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Adds --kv-bytes and --host-kv-bytes, for `parse_bytes`."""
    parser.add_argument(
        "--kv-bytes",
        metavar="SIZE",
        help="memory for keys and values, such as 8GiB (default: for rows of 2,048 tokens, at most "
        "2 GiB)",
    )
    parser.add_argument(
        "--host-kv-bytes", metavar="SIZE", help="host memory for evicted ones (default: none)"
    )


def add_stops(parser: argparse.ArgumentParser) -> None:
    """Adds --stop, --include-stop and --ignore-eos."""
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="a completion ends before this text; may be given several times (default: the "
        "checkpoint's own)",
    )
    parser.add_argument(
        "--include-stop", action="store_true", help="a completion ends after its stop text"
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="the model's own stop tokens end nothing",
    )


def add_grammar(parser: argparse.ArgumentParser) -> None:
    """Adds --json-schema, --regex, --lark and --choice."""
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema",
        metavar="FILE",
        help="a completion is JSON that is valid under the schema in this file, or in this text",
    )
    group.add_argument(
        "--regex", metavar="PATTERN", help="a completion matches this regular expression"
    )
    group.add_argument(
        "--lark", metavar="FILE", help="a completion is a text of the grammar in this file"
    )
    group.add_argument(
        "--choice",
        action="append",
        metavar="TEXT",
        help="a completion is this text; may be given several times, for one of several",
    )


def _grammar_of(options: argparse.Namespace) -> Grammar | None:
    """The grammar that was given, or None."""
    schema = getattr(options, "json_schema", None)
    if schema is not None:
        is_text = schema.lstrip().startswith("{") or schema in ("true", "false")
        text = schema if is_text else read_text("json-schema", None, schema)
        return Grammar.json_schema(text)
    if getattr(options, "regex", None) is not None:
        return Grammar.regex(options.regex)
    if getattr(options, "lark", None) is not None:
        return Grammar.lark(read_text("lark", None, options.lark))
    if getattr(options, "choice", None) is not None:
        return Grammar.choices(options.choice)
    return None


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Sampler` that were given, checked."""
    given = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p", *(name for name, *_ in _SETTINGS))
        if (value := getattr(options, name)) is not None
    }
    if getattr(options, "ignore_eos", False):
        given["ignore_eos"] = True
    if grammar := _grammar_of(options):
        given["grammar"] = grammar
    if options.processors_from is not None:
        _import(options.processors_from)
    if options.processor:
        given["processors"] = [*map(_parse_processor, options.processor)]
    Sampler(**given)
    return given


def _import(module: str) -> None:
    """Imports the module that --processors-from names; raises ValueError where that fails."""
    try:
        pkgutil.resolve_name(module)
    except Exception as error:  # of the module's own, too
        raise ValueError(
            f"--processors-from is {module!r}, which cannot be imported ({type(error).__name__}: "
            f"{error}); give the name of a Python module, whose folder is in PYTHONPATH"
        ) from error


def _parse_processor(text: str) -> list[Any]:
    """The name and the parameters of "name,strength=2,length=3", as JSON can hold them.

    Raises:
      ValueError: the text is something else.
    """
    name, *parts = text.split(",")
    try:
        pairs = [part.split("=") for part in parts]
        return [name, {parameter.strip(): float(value) for parameter, value in pairs}]
    except ValueError as error:
        raise ValueError(
            f"--processor is {text!r}; it must be a name and numbers by parameter, such as "
            "my_name,strength=2"
        ) from error


def add_logprobs(parser: argparse.ArgumentParser, where: str) -> None:
    """Adds --logprobs and --top-logprobs.

    Args:
      parser: of a command.
      where: the place in which the output has them, for the help.
    """
    parser.add_argument(
        "--logprobs",
        choices=(RAW, PROCESSED),
        help=f"{where} those of all tokens: under the model itself, or of the chances that they are "
        "drawn with, after all settings (default raw)",
    )
    parser.add_argument(
        "--top-logprobs",
        type=int,
        default=0,
        metavar="N",
        help=f"{where} also the N likeliest tokens in each place, up to 20",
    )


def check_logprobs(options: argparse.Namespace) -> None:
    """Raises ValueError where --logprobs or --top-logprobs would be ignored, without --json."""
    for name in ("top_logprobs", "logprobs"):
        if getattr(options, name) and not options.json:
            raise ValueError(
                f"--{name.replace('_', '-')} needs --json, whose object has log-probabilities; texts "
                "alone have none"
            )


def need_tokenizer(model: LoadedModel, name: str) -> None:
    """Raises ValueError for a model without a tokenizer, where a command reads texts.

    Args:
      model: that was loaded.
      name: by which it was.
    """
    if model.tokenizer is None:
        raise ValueError(
            f"the model folder {name} has no tokenizer, and this command reads texts; add the "
            "tokenizer's files (tokenizer.json and tokenizer_config.json) to it"
        )


def parse_numbers(option: str, text: str | None) -> list[int]:
    """The whole numbers of "256,512,1024"; none without a text.

    Raises:
      ValueError: the text is something else.
    """
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise ValueError(
            f"{option} is {text!r}; it must be whole numbers with commas between them, such as "
            "256,512,1024"
        ) from error


def parse_bytes(text: str, option: str = "--max-kv-bytes") -> int:
    """The bytes of a number with or without a unit: 2e9, 2GB (powers of 1000), 512MiB (of 1024).

    Args:
      text: as it was given.
      option: its name, for the error.

    Raises:
      ValueError: the text is something else, or less than one byte.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\+?\d{1,2})?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _UNITS or (size := int(float(match[1]) * _UNITS[match[2]])) < 1:
        raise ValueError(
            f"{option} is {text!r}; it must be a number of bytes such as 2e9, 2GB or 512MiB"
        )
    return size


def read_text(what: str, given: str | None, file: str | None, alternative: str = "") -> str:
    """The text that --WHAT gives, or the file that --WHAT-file names; `-` is stdin.

    Args:
      what: "prompt" or "problem".
      given, file: the values of the two options.
      alternative: a further way to give one, for the error message: " or --chat".

    Raises:
      ValueError: neither is given, the file cannot be read, or the text is empty.
    """
    if given is None and file is None:
        raise ValueError(
            f"there is no {what}; give --{what} TEXT{',' if alternative else ' or'} --{what}-file "
            f"FILE{alternative}"
        )
    try:
        if given is not None:
            text = given
        elif file == "-":
            text = sys.stdin.read(_MAX_TEXT + 1)
        else:
            with open(str(file), encoding="utf-8") as opened:
                text = opened.read(_MAX_TEXT + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the {what} file {file} cannot be read ({error}); give a file of UTF-8 text"
        ) from error
    if len(text) > _MAX_TEXT:
        raise ValueError(
            f"the {what} has more than {_MAX_TEXT:,} characters, which no model's context holds; "
            "give a shorter one"
        )
    if not text.strip():
        raise ValueError(f"the {what} is empty; give at least one word")
    return text
