"""Grammars: what a row's text must be, as it is written; `jaxshare.serving.grammars` compiles them."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshare.argument_checks import as_list, shown

KINDS = ("json_schema", "regex", "lark", "choices")
"""The kinds of grammars, which are the names of the methods that make them."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A description that a whole text must fit. The methods make one.

        sampler = SamplingParams(grammar=Grammar.json_schema({"type": "integer"}))

    Attributes:
      kind: one of `KINDS`.
      source: the description as a text; JSON for a schema and for choices.

    Raises:
      ValueError: an unknown kind, or no text.
      TypeError: they are no texts.
    """

    kind: str
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ValueError(
                f"the kind of a grammar is {shown(self.kind)}; it must be one of {', '.join(KINDS)}"
            )
        _check_text(f"a grammar of kind {self.kind}", self.source)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> "Grammar":
        """A JSON text that is valid under a JSON schema.

        Args:
          schema: as Python's values, or as JSON. True admits every JSON text.

        Raises:
          ValueError: a text that is no JSON, or a schema that is neither an object nor a boolean.
          TypeError: values that JSON does not have.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the JSON schema is no JSON: {error}") from None
        if not isinstance(schema, Mapping | bool):
            raise ValueError(
                f"the JSON schema is {shown(schema)}; it must be an object, or true or false"
            )
        try:
            source = json.dumps(_plain(schema), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"the JSON schema has a value that JSON has not: {error}") from None
        return cls("json_schema", source)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Grammar":
        """The grammar of a dict with one key, a kind, such as {"regex": "[0-9]+"}; the value is what
        the method of that name takes.

        Raises:
          ValueError, TypeError: it is something else.
        """
        if not isinstance(given, Mapping):
            raise TypeError(f"the grammar is {shown(given)}; it must be a dict")
        if len(given) != 1 or (kind := next(iter(given))) not in KINDS:
            raise ValueError(
                f"the grammar is {shown(given)}; it must have one key, one of {', '.join(KINDS)}"
            )
        make: Callable[[Any], Grammar] = getattr(cls, kind)
        return make(given[kind])

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object, as OpenAI's `response_format={"type": "json_object"}` asks for."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """A text that a regular expression matches from its begin to its end.

        It has the syntax of Rust's `regex` crate, which is Python's without look-around and
        back-references.
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """A text of a context-free grammar in the syntax of Lark, as `llguidance` reads it, whose
        first rule is `start`."""
        return cls("lark", text)

    @classmethod
    def choices(cls, texts: Sequence[str]) -> "Grammar":
        """One of some texts.

        Raises:
          ValueError: there are none, or one is empty.
          TypeError: they are no texts.
        """
        found = as_list("choices", texts)
        if not found:
            raise ValueError("choices is empty; give at least one text")
        for text in found:
            _check_text("a text of choices", text)
        return cls("choices", json.dumps(list(dict.fromkeys(found)), ensure_ascii=False))


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} is {shown(text)}; it must be a text")
    if not text:
        raise ValueError(f"{name} is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} has half of a surrogate pair, which is no text") from None


def _plain(value: Any) -> Any:
    """Mappings of any class as dicts."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
