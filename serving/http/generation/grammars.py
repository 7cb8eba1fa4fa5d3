"""Grammars of requests: what a text has to be, in OpenAI's words and in vLLM's."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxshare import Grammar
from jaxshare.serving.http.errors import bad_request
from jaxshare.serving.http.generation.fields import (
    ResponseFormat,
    SamplingFields,
    StructuredOutputs,
)


@dataclasses.dataclass(frozen=True)
class AskedGrammar:
    """A grammar, and the field that asks for it."""

    field: str
    grammar: Grammar


def grammar_of(fields: SamplingFields, format: ResponseFormat | None = None) -> AskedGrammar | None:
    """Returns the grammar that a request asks for, or None for free text.

    Args:
      fields: of the request, with `guided_*` and `structured_outputs` as vLLM has them.
      format: OpenAI's `response_format`.

    Raises:
      ApiError: there are several, or one cannot be used.
    """
    asked = [*_guided(fields), *_structured(fields.structured_outputs), *_format(format)]
    if len(asked) > 1:
        names = " and ".join(name for name, _ in asked)
        raise bad_request(f"{names} are given; a text can have one form, give one", asked[1][0])
    for name, make in asked:
        try:
            return AskedGrammar(name, make())
        except (ValueError, TypeError) as error:
            raise bad_request(f"{name}: {error}", name, "invalid_value") from None
    return None


_Asked = list[tuple[str, Callable[[], Grammar]]]


def _guided(fields: SamplingFields) -> _Asked:
    return _given(
        {
            "guided_json": (fields.guided_json, Grammar.json_schema),
            "guided_regex": (fields.guided_regex, Grammar.regex),
            "guided_choice": (fields.guided_choice, Grammar.choices),
            "guided_grammar": (fields.guided_grammar, Grammar.lark),
        }
    )


def _structured(given: StructuredOutputs | None) -> _Asked:
    if given is None:
        return []
    found = _given(
        {
            "structured_outputs.json": (given.json_schema, Grammar.json_schema),
            "structured_outputs.json_object": (
                given.json_object or None,
                lambda _: Grammar.json_object(),
            ),
            "structured_outputs.regex": (given.regex, Grammar.regex),
            "structured_outputs.choice": (given.choice, Grammar.choices),
            "structured_outputs.grammar": (given.grammar, Grammar.lark),
        }
    )
    if not found:
        raise bad_request(
            "structured_outputs is empty; give json, json_object, regex, choice or grammar",
            "structured_outputs",
        )
    return found


def _format(format: ResponseFormat | None) -> _Asked:
    if format is None or format.type == "text":
        return []
    if format.type == "json_object":
        return [("response_format", Grammar.json_object)]
    schema = None if format.json_schema is None else format.json_schema.json_schema
    if schema is None:
        raise bad_request(
            "response_format of type json_schema has no schema; give it in json_schema.schema",
            "response_format",
        )
    return [("response_format", lambda: Grammar.json_schema(schema))]


def _given(asked: dict[str, tuple[Any, Callable[[Any], Grammar]]]) -> _Asked:
    return [
        (name, lambda make=make, value=value: make(value))
        for name, (value, make) in asked.items()
        if value is not None
    ]
