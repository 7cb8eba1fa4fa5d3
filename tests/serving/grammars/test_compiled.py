"""Compiled grammars: tables over tokens, masks, and what is refused."""

import dataclasses
import json
import random

import jsonschema
import llguidance.numpy
import numpy as np
import pytest

from jaxshare import Grammar, SamplingParams
from jaxshare.decoding.grammar_tables import MOST_FORCED, pack_bits
from jaxshare.serving import generate
from jaxshare.serving.grammars import CompiledGrammar, GrammarError, compile_grammar
from jaxshare.serving.grammars.patterns import BeyondError
from jaxshare.serving.grammars.schema_pattern import schema_pattern
from tests.helpers import one_layer
from tests.serving.grammars.schemas import random_schema

MODEL = one_layer()
STOPS = MODEL.generation.stop_tokens
VOCAB = MODEL.config.vocab_size


def compiled(grammar: Grammar, **more) -> CompiledGrammar:
    made = compile_grammar(MODEL, SamplingParams(grammar=grammar, **more))
    assert made
    return made


def admitted(grammar: CompiledGrammar, state: int) -> np.ndarray:
    """The tokens that a state of the table admits."""
    table = grammar.table
    assert table
    return np.flatnonzero(table.transitions[state][table.classes] >= 0)


def walk(grammar: CompiledGrammar, rng: random.Random, longest: int = 200) -> list[int] | None:
    """The tokens of a random text of a table, without the stop token; None for a long one."""
    table, state, tokens = grammar.table, 0, []
    assert table
    for _ in range(longest):
        # A stop token more often than others, so that texts end.
        choices = admitted(grammar, state).tolist()
        ends = [token for token in choices if token in STOPS]
        token = rng.choice(ends if ends and rng.random() < 0.2 else choices)
        if token in STOPS:
            return tokens
        tokens.append(token)
        state = int(table.transitions[state, table.classes[token]])
    return None


def text_of(grammar: CompiledGrammar, tokens: list[int]) -> str:
    return b"".join(grammar.vocabulary.tokens[token] for token in tokens).decode()


CHOICES = ["yes", "no", "maybe", "maybe not", "été €"]


def test_a_table_of_choices_leads_to_each_of_them_and_to_nothing_else():
    grammar, found = compiled(Grammar.choices(CHOICES)), set()
    rng = random.Random(0)
    for _ in range(200):
        tokens = walk(grammar, rng)
        assert tokens is not None
        found.add(text_of(grammar, tokens))
    assert found == {*CHOICES}


def test_a_state_admits_what_can_still_become_a_text_unless_one_token_must_come():
    grammar, vocabulary = compiled(Grammar.choices(CHOICES)), None
    table, vocabulary = grammar.table, grammar.vocabulary.tokens
    assert table
    begun = {0: b""}
    for state in range(table.num_states):  # numbered as they are reached
        if state not in begun:
            continue
        rests = [
            t.encode()[len(begun[state]) :] for t in CHOICES if t.encode().startswith(begun[state])
        ]
        expected = {
            n
            for n, token in enumerate(vocabulary)
            if token and any(r.startswith(token) for r in rests)
        }
        expected |= {*STOPS} if b"" in rests else set()
        found = {*admitted(grammar, state).tolist()}
        assert found == expected or (len(found) == 1 and found < expected)
        for token in found - {*STOPS}:
            reached = int(table.transitions[state, table.classes[token]])
            begun.setdefault(reached, begun[state] + vocabulary[token])


def test_what_must_come_is_cut_as_the_tokenizer_cuts_it():
    word = "answer box answers 2024"
    grammar = compiled(Grammar.choices([word]))
    table = grammar.table
    assert table and MODEL.tokenizer
    expected = MODEL.tokenizer.encode(word, add_special_tokens=False)
    tokens, state = [], 0
    while (found := admitted(grammar, state)).size == 1 and found[0] not in STOPS:
        tokens.append(int(found[0]))
        state = int(table.transitions[state, table.classes[tokens[-1]]])
    assert tokens == expected
    forced, after, count = table.forced(STOPS)
    assert forced[0, : count[0]].tolist() == expected[:MOST_FORCED]
    assert table.read(expected[: count[0]]) == after[0, count[0] - 1]


def test_masks_are_the_admitted_tokens_a_bit_each():
    grammar = compiled(Grammar.regex(r"[a-d]+(\.\d{2})?"))
    assert grammar.table
    masks = grammar.table.masks()
    assert masks.shape == (grammar.table.num_states, -(-VOCAB // 32))
    for state, words in enumerate(masks):
        bits = [n for n in range(VOCAB) if words[n // 32] >> np.uint32(n % 32) & np.uint32(1)]
        assert bits == admitted(grammar, state).tolist()
    assert pack_bits(np.ones((2, 33), bool)).tolist() == [[2**32 - 1, 1]] * 2


REGEXES = ["[0-9]{3}-[0-9]{4}", r"[a-z]+(@[a-z]+\.com)?", "(ab|cd)*e?", r"[^,]{1,5},", "a|ab|abc"]


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_table_of_a_regex_admits_what_llguidance_admits(pattern):
    """Token by token, where no token is forced; a forced one is among those that it admits."""
    grammar, rng = compiled(Grammar.regex(pattern)), random.Random(1)
    assert grammar.table
    for _ in range(20):
        tokens = walk(grammar, rng) or []
        for count in range(len(tokens) + 1):
            matcher = grammar.matcher(tokens[:count])
            words = llguidance.numpy.allocate_token_bitmask(1, VOCAB)
            llguidance.numpy.fill_next_token_bitmask(matcher, words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB]
            expected = {*np.flatnonzero(bits).tolist()}
            found = {*admitted(grammar, grammar.table.read(tokens[:count])).tolist()}
            assert found == expected or (len(found) == 1 and found < expected), tokens[:count]


@pytest.mark.parametrize("seed", range(60))
def test_every_text_of_the_pattern_of_a_schema_is_valid_under_it(seed):
    schema = random_schema(seed)
    try:
        schema_pattern(schema)
    except BeyondError:
        return
    grammar, rng = compiled(Grammar.json_schema(schema)), random.Random(seed)
    if grammar.table is None:
        return
    texts = [text_of(grammar, tokens) for _ in range(20) if (tokens := walk(grammar, rng))]
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


SIMPLE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"type": "number"}},
        "inner": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/inner"}]},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
    "$defs": {
        "inner": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        }
    },
}
TEXTS = [
    '{"name": "", "kind": "a", "sizes": []}',
    '{"name":"q\\"é\\u00e9\\n","kind":"b","sizes":[0,-1.5,2e10, 3E-7],"inner":null}',
    '{\n  "name": "x",\n  "kind": "a",\n  "sizes": [\n    1\n  ],\n  "inner": {\n    "on": true\n  }\n}',
]
NOT = [
    '{"name": "", "kind": "c", "sizes": []}',
    '{"kind": "a", "name": "", "sizes": []}',
    '{"name": "", "kind": "a"}',
    '{"name": "\n", "kind": "a", "sizes": []}',
    '{"name": "", "kind": "a", "sizes": [01]}',
    '{"name": "", "kind": "a", "sizes": [], "more": 1}',
    '{"name": "\\ud800", "kind": "a", "sizes": []}',
]


def test_a_schema_of_closed_objects_is_a_table_that_admits_the_usual_ways_to_write_its_texts():
    grammar = compiled(Grammar.json_schema(SIMPLE))
    table, tokens = grammar.table, grammar.vocabulary.tokens
    assert table
    number = {token: n for n, token in reversed([*enumerate(tokens)]) if token}

    def accepts(text: str) -> bool:
        """Byte by byte, and with each state's forced token where there is one."""
        state, rest = 0, text.encode()
        while rest:
            found = admitted(grammar, state)
            only = tokens[found[0]] if len(found) == 1 else b""
            token = only if only and rest.startswith(only) else rest[:1]
            state = int(table.transitions[state, table.classes[number[token]]])
            if state < 0:
                return False
            rest = rest[len(token) :]
        return bool({*admitted(grammar, state).tolist()} & {*STOPS})

    assert [text for text in TEXTS if not accepts(text)] == []
    assert [text for text in NOT if accepts(text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        {"type": "integer", "minimum": 3},
        {"type": "string", "pattern": "a"},
        {
            "$ref": "#/$defs/list",
            "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}},
        },
        True,
    ],
    ids=str,
)
def test_what_is_not_regular_or_not_known_to_be_is_read_on_the_host(schema):
    assert compiled(Grammar.json_schema(schema)).table is None


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.regex("(a"), r"regular expression does not compile: .*unclosed group"),
        (
            Grammar.lark('start: "a" b\nb: c'),
            r'Lark grammar does not compile: at 2\(4\): unknown name: "c"',
        ),
        (Grammar.json_schema({"type": "int"}), "JSON schema is not valid at type"),
        (Grammar.json_schema({"type": "object", "if": {}}), "JSON schema does not compile: .*if"),
        (Grammar.regex("[^\\x00-\\x{10FFFF}]"), "no text of the regular expression can be made"),
        (Grammar.json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "JSON schema"),
        (Grammar.json_schema(False), "JSON schema"),
        (Grammar.regex("a" * 2**21), "regular expression has 2097152 characters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_grammar_that_cannot_be_used_is_refused_with_the_place(grammar, message):
    with pytest.raises(GrammarError, match=message):
        compiled(grammar)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"min_length": 9}, "min_length"),
    ],
)
def test_settings_that_a_grammar_rules_out_are_named(settings, name):
    with pytest.raises(GrammarError, match=name):
        compiled(Grammar.choices(["a"]), **settings)
    with pytest.raises(GrammarError, match=name):
        generate(MODEL, ["x"], sampler=SamplingParams(grammar=Grammar.choices(["a"]), **settings))


def test_a_model_without_a_tokenizer_or_without_a_stop_token_is_refused():
    sampler = SamplingParams(grammar=Grammar.choices(["a"]))
    with pytest.raises(GrammarError, match="no tokenizer"):
        compile_grammar(dataclasses.replace(MODEL, tokenizer=None), sampler)
    generation = dataclasses.replace(MODEL.generation, stop_tokens=())
    with pytest.raises(GrammarError, match="no stop token"):
        compile_grammar(dataclasses.replace(MODEL, generation=generation), sampler)


def test_a_grammar_is_compiled_once_and_a_stop_token_of_ones_own_ends_its_text():
    grammar = Grammar.regex("[ab]{1,3}")
    assert compiled(grammar) is compiled(grammar)
    assert MODEL.tokenizer
    own = MODEL.tokenizer.encode("b", add_special_tokens=False)[0]
    other = compiled(grammar, stop_token_ids=(own,))
    assert other.table and other is not compiled(grammar)
    assert own not in admitted(other, 0)  # it ends a text, which must not end yet
    after = other.table.read(MODEL.tokenizer.encode("a", add_special_tokens=False))
    assert {own, *STOPS} <= {*admitted(other, after).tolist()}
