"""Prompt previews: the tokens that a session feeds before it samples, without its parameters.

    jaxshare workers Qwen/Qwen3-8B --problem "What is 12 * 7?" --format qwen3+user --show-prompt

They are encoded as `Workers` encodes them, by the same `SessionTexts`.
"""

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from jaxshare import models
from jaxshare.models import LoadedModel
from jaxshare.serving.workers.layouts import MakeLayout, WorkersLayout, layout_maker
from jaxshare.serving.workers.prompts.format import Format
from jaxshare.serving.workers.prompts.session_prompt import SessionTexts
from jaxshare.serving.workers.roster import Roster, check_names
from jaxshare.serving.workers.setup import check_problem
from jaxshare.serving.workers.text.codec import Codec, codec_of

_COLUMNS = 120


@dataclasses.dataclass(frozen=True)
class Fed:
    """Tokens that are fed, and their text.

    Attributes:
      text: special tokens included, as the tokenizer writes them.
      tokens: their ids; pieces: the text of each. Bytes that are no whole character are written as
        in `\\xf0`.
    """

    text: str
    tokens: list[int]
    pieces: list[str]

    @classmethod
    def of(cls, codec: Codec, tokens: Sequence[int]) -> "Fed":
        """The tokens with their text."""
        tokenizer: Any = codec.tokenizer
        # Special tokens have no text among workers, but a name in the tokenizer.
        said = [
            codec.vocabulary[token] or tokenizer.convert_ids_to_tokens(token).encode()
            for token in tokens
        ]
        text, *pieces = (part.decode(errors="backslashreplace") for part in (b"".join(said), *said))
        return cls(text, list(tokens), pieces)


@dataclasses.dataclass(frozen=True)
class PromptView:
    """The tokens that a session starts with.

    Attributes:
      blocks: by name, their contents before any worker has written; the prompt's comes first.
      workers: by name, the first tokens of each, in the block that it writes.
      sees: by name, the blocks that each worker sees, in order.
      forbidden: tokens that no worker samples.
    """

    blocks: dict[str, Fed]
    workers: dict[str, Fed]
    sees: dict[str, tuple[str, ...]]
    forbidden: Fed


def prompt_view(
    model: LoadedModel,
    problem: str,
    *,
    names: Sequence[str] = ("Alice", "Bob"),
    layout: str | WorkersLayout | MakeLayout = "combined",
    format: Format | None = None,
) -> PromptView:
    """The tokens that `Workers` with these arguments feeds before it samples.

    The model may be an outline.

    Raises:
      ValueError: a model without a tokenizer, an empty problem, or invalid names or layout.
    """
    check_problem(model, problem)
    check_names(names)
    format, codec = format or Format.of(model), codec_of(model.tokenizer, model.config.vocab_size)
    made = layout_maker(layout)(tuple(names), format)
    made.check(names)
    roster = Roster.create(names, made, max_rows=len(names), small=[*made.texts])
    texts = SessionTexts.of(codec, format, problem, roster)
    contents = {
        made.prompt: texts.prompt,
        **{block: codec.encode(text) for block, text in made.texts.items()},
    }
    return PromptView(
        {block: Fed.of(codec, tokens) for block, tokens in contents.items()},
        {name: Fed.of(codec, texts.first_opening(roster, name)) for name in names},
        dict(made.sees),
        Fed.of(codec, format.forbidden_tokens(model.tokenizer)),
    )


def preview_text(
    options: argparse.Namespace, problem: str, names: Sequence[str], format: Format | None
) -> str:
    """The preview for the options of `jaxshare workers`, as text or, with --json, as JSON.

    Raises:
      FileNotFoundError, ConfigError, ValueError: see `jaxshare.models.outline` and `prompt_view`.
    """
    model = models.outline(options.model)
    view = prompt_view(model, problem, names=names, layout=options.layout, format=format)
    if options.json:
        return json.dumps(
            {"model": options.model, "format": options.format, **dataclasses.asdict(view)}
        )
    return _text(view)


def _text(view: PromptView) -> str:
    first = next(iter(view.blocks))
    parts = [
        _section(f"block {block!r}" + (", the prompt" if block == first else ""), fed)
        for block, fed in view.blocks.items()
    ]
    parts += [
        _section(
            f"{name} sees {', '.join(map(repr, view.sees[name]))}; its first step is in the last "
            "one and starts with",
            fed,
        )
        for name, fed in view.workers.items()
    ]
    if view.forbidden.tokens:
        parts.append(f"=== tokens that no worker samples\n{_tokens(view.forbidden)}")
    return "\n\n".join(parts)


def _section(title: str, fed: Fed) -> str:
    return f"=== {title}: {len(fed.tokens)} tokens\n{fed.text}\n--- as tokens\n{_tokens(fed)}"


def _tokens(fed: Fed) -> str:
    """Pairs of an id and its text in quotes."""
    pairs = [
        f"{token} {json.dumps(piece, ensure_ascii=False)}"
        for token, piece in zip(fed.tokens, fed.pieces, strict=True)
    ]
    # Lines must not break at spaces inside a pair.
    lines = textwrap.wrap(
        "  ".join(pair.replace(" ", "\0") for pair in pairs),
        _COLUMNS,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")
