"""Formats by name: presets for families of models, and files of your own.

    format_named("qwen3")  # for Qwen3, with worked examples, in the system message
    format_named("qwen3+user+no-examples")  # in the user's message, without the examples
    format_named("own.json")  # a JSON object with the fields of `Format`

The family of a checkpoint is not guessed: its config.json does not have it (QwQ-32B, Qwen2.5 and a
distillation of DeepSeek-R1 all are `qwen2`), and its folder may have any name. A preset does not
imply that `load` can load the family: of Phi-4-reasoning it loads a conversion to Llama's form, of
DeepSeek-R1 the distillations.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from jaxshare.models import LoadedModel
from jaxshare.models.config_fields import read_json
from jaxshare.serving.workers.prompts.format import COLLABORATIVE, PLAIN, Format, collaborative


@dataclasses.dataclass(frozen=True)
class Preset:
    """The settings of a family of models; the instructions are those of `collaborative`.

    Attributes:
      summary: one line for lists of presets.
      roles: of the messages that may carry the instructions; the first is the default.
      fields: of `Format`, where they are not its defaults.
      advises_sampling: whether the makers advise against greedy decoding.
    """

    summary: str
    roles: tuple[Literal["system", "user"], ...] = ("system", "user")
    fields: Mapping[str, Any] = MappingProxyType({})
    advises_sampling: bool = False


def _ends(*more: str) -> tuple[str, ...]:
    """The texts that no worker may sample: the usual ones, and those that end a family's turns.

    Only an answer may end a turn.
    """
    return (*COLLABORATIVE.forbidden, *more)


FORMATS: Mapping[str, Preset] = MappingProxyType(
    {
        # The tokenizer's own chat template has the texts around the instructions. A preset has what
        # a template has not.
        "collaborative": Preset(
            "any chat model: a think block is opened where the tokenizer has a token for it"
        ),
        # The template opens the think block after its generation prompt. The card asks for that,
        # and for sampling, against repetition.
        "qwq": Preset(
            "QwQ-32B: the chat template opens the think block",
            advises_sampling=True,
            fields={"think": "always", "forbidden": _ends("<|im_end|>", "<|endoftext|>")},
        ),
        # The template opens no block: the model does, by training. With enable_thinking false the
        # template writes an empty block, closed again. Thinking-2507 models have a template that
        # opens the block. The card of Qwen3 warns against greedy decoding.
        "qwen3": Preset(
            "Qwen3 in thinking mode: the session opens the think block",
            advises_sampling=True,
            fields={
                "think": "always",
                "chat_template_kwargs": {"enable_thinking": True},
                "forbidden": _ends("<|im_end|>", "<|endoftext|>"),
            },
        ),
        "qwen3-no-think": Preset(
            "Qwen3 without thinking: the chat template closes an empty think block",
            advises_sampling=True,
            fields={
                "think": "never",
                "chat_template_kwargs": {"enable_thinking": False},
                "forbidden": _ends("<think>", "<|im_end|>", "<|endoftext|>"),
            },
        ),
        # The card advises to put everything into the user's message, to start every reply with a
        # think block, and to sample at 0.5 to 0.7; that of R1-0528 allows a system message.
        # Templates since February 2025 open the block, older ones do not. The paper finds that
        # examples in the prompt do harm (DeepSeek-R1, section 5); those here show a page rather
        # than solved problems, and "+no-examples" leaves them out. The distillations have the same
        # template and the same special tokens, whether they are Qwen or Llama.
        "deepseek-r1": Preset(
            "DeepSeek-R1 and its distillations: everything in the user's message",
            roles=("user", "system"),
            advises_sampling=True,
            fields={"think": "always"},
        ),
        # The template writes a system message of its own and drops others. It opens no think block:
        # the model does, by training. Where a conversion of the tokenizer lacks the token <think>,
        # the same text is there in ordinary tokens.
        "phi-4-reasoning": Preset(
            "Phi-4-reasoning and -plus: the template has its own system message, the session opens "
            "the think block",
            roles=("user",),
            advises_sampling=True,
            fields={"think": "always", "forbidden": _ends("<|im_end|>", "<|endoftext|>")},
        ),
        # Not trained to think in a block. From 3.1 on the system message has a date in it: that of
        # 3.1 and 3.3 is fixed, that of 3.2 is today's, with which the same command would have
        # another prompt tomorrow.
        "llama-3": Preset(
            "Llama 3 to 3.3, instruction-tuned: no think block, and a fixed date in the system "
            "message",
            fields={
                "think": "never",
                "chat_template_kwargs": {"date_string": "26 Jul 2024"},
                "forbidden": _ends("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
            },
        ),
    }
)
"""Presets by name. What they rely on is written beside them; it is from the families' model cards
and chat templates as of mid-2025."""

OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "first": 'instructions that say "I" instead of "you"',
        "no-examples": "without worked examples",
        "no-suggestions": "without suggestions how to share the work",
        "system": "instructions in the system message (the default where the family has one)",
        "user": "instructions at the beginning of the user's message",
    }
)
"""The options after the name of a preset, each after a plus sign."""


def format_named(name: str, *, plain: bool = False) -> Format:
    """The format with a name.

    Args:
      name: a preset with options after it ("qwen3+user+no-examples"), or a JSON file with the
        fields of `Format`, as workers.json.
      plain: for one stream: a preset's chat without instructions and headers. A file's texts are
        its own.

    Raises:
      ValueError: neither a preset nor a file, an option that is unknown or that the family does not
        have, or a file that does not describe a format.
    """
    family, *options = name.split("+")
    if family not in FORMATS:
        return _from_file(name)
    preset = FORMATS[family]
    if unknown := [option for option in options if option not in OPTIONS]:
        raise ValueError(
            f"the format {name!r} has the option {unknown[0]!r}, which there is not; the options "
            f"are {', '.join(OPTIONS)}"
        )
    roles = [role for role in ("system", "user") if role in options] or [preset.roles[0]]
    if len(roles) > 1:
        raise ValueError(
            f"the format {name!r} puts the instructions into both messages; give +system or +user"
        )
    if roles[0] not in preset.roles:
        raise ValueError(
            f"the format {name!r} puts the instructions into the {roles[0]} message, which "
            f"{family} has no use for; leave out +{roles[0]}"
        )
    base = (
        PLAIN
        if plain
        else collaborative(
            "first" if "first" in options else "second",
            suggestions="no-suggestions" not in options,
            examples="no-examples" not in options,
        )
    )
    # one stream may end its turn
    fields = {key: value for key, value in preset.fields.items() if not plain or key != "forbidden"}
    return dataclasses.replace(base, in_system_role=roles[0] == "system", **fields)


def _from_file(name: str) -> Format:
    file = Path(name)
    if not file.is_file():
        why = "that is a folder" if file.is_dir() else "there is no preset and no file of this name"
        raise ValueError(
            f"the format is {name!r}, but {why}; the presets are {', '.join(FORMATS)}, each with "
            f"options such as {next(iter(FORMATS))}+no-examples+user, and a file is a JSON object "
            "with the fields of workers.json"
        )
    try:
        return Format.from_json(read_json(file), str(file))
    except OSError as error:
        raise ValueError(
            f"the format {name} cannot be read ({error}); give a file that can be"
        ) from error


def format_of(model: LoadedModel, format: Format | str | None) -> Format:
    """The format to use: a given one, one by its name, or the model's own.

    Raises:
      ValueError: see `format_named` and `Format.of`.
    """
    return (
        Format.of(model)
        if format is None
        else format_named(format)
        if isinstance(format, str)
        else format
    )


def advises_sampling(format: Format | str | None) -> bool:
    """Returns whether this is a preset whose makers advise against greedy decoding."""
    return (
        isinstance(format, str)
        and (family := format.split("+")[0]) in FORMATS
        and FORMATS[family].advises_sampling
    )


# On the command line.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --format and --list-formats."""
    parser.add_argument(
        "--format",
        metavar="NAME|FILE",
        help="the instructions of workers: a preset such as qwen3 or qwen3+user+no-examples, or "
        "a JSON file with the fields of workers.json (default: the model's own workers.json, "
        "or collaborative)",
    )
    parser.add_argument(
        "--list-formats",
        action=_List,
        nargs=0,
        help="print the presets and their options, and exit",
    )


class _List(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        width = max(map(len, (*FORMATS, *OPTIONS))) + 3
        presets = [f"  {name:{width}}{preset.summary}" for name, preset in FORMATS.items()]
        options = [f"  {'+' + name:{width}}{meaning}" for name, meaning in OPTIONS.items()]
        print("\n".join(["presets:", *presets, "options, after a preset:", *options]))
        parser.exit()
