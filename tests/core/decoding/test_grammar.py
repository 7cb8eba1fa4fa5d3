"""Grammars as they are written."""

import json

import pytest

from jaxshare import Grammar, SamplingParams


def test_each_kind_has_a_method_and_a_form_as_a_dict():
    assert Grammar.of({"regex": "a+"}) == Grammar.regex("a+")
    assert Grammar.of({"choices": ["a", "b", "a"]}) == Grammar.choices(["a", "b"])
    assert Grammar.of({"lark": 'start: "a"'}) == Grammar.lark('start: "a"')
    schema = {"type": "object", "properties": {"é": {"type": "null"}}}
    given = Grammar.of({"json_schema": schema})
    assert given == Grammar.json_schema(json.dumps(schema)) and json.loads(given.source) == schema
    assert Grammar.json_object() == Grammar.json_schema({"type": "object"})


def test_a_sampler_keeps_it_through_json():
    sampler = SamplingParams(temperature=0.5, grammar=Grammar.choices(["a", "é"]))
    assert SamplingParams.from_json(json.loads(json.dumps(sampler.as_json()))) == sampler
    assert SamplingParams.from_json(SamplingParams().as_json()).grammar is None
    assert sampler.not_redrawn == "grammar"
    assert hash(sampler) == hash(
        SamplingParams(temperature=0.5, grammar=Grammar.choices(["a", "é"]))
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("xml", "a"), "kind of a grammar is 'xml'; it must be one of json_schema"),
        (lambda: Grammar.regex(""), "grammar of kind regex is empty"),
        (lambda: Grammar.lark(3), "it must be a text"),
        (lambda: Grammar.regex("\ud800"), "half of a surrogate pair"),
        (lambda: Grammar.choices([]), "choices is empty"),
        (lambda: Grammar.choices(["a", ""]), "a text of choices is empty"),
        (lambda: Grammar.choices("ab"), "choices"),
        (lambda: Grammar.json_schema("{"), "JSON schema is no JSON"),
        (lambda: Grammar.json_schema([]), "must be an object"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "JSON"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "JSON"),
        (lambda: Grammar.of({"regex": "a", "lark": "b"}), "one key"),
        (lambda: Grammar.of({"of": "a"}), "one key"),
        (lambda: Grammar.of("a"), "must be a dict"),
        (lambda: SamplingParams(grammar="a+"), "must be a Grammar"),
    ],
)
def test_what_is_no_grammar_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
