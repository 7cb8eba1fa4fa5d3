"""Grammars of a decode loop's rows: tables that come and go, and rows that the host reads along."""

import jax
import llguidance.numpy
import numpy as np
import pytest

from jaxshare import Grammar, SamplingParams
from jaxshare.decoding.grammar_rows import NO_GRAMMAR, SERVED, GrammarRows
from jaxshare.serving.grammars import CompiledGrammar, compile_grammar, places
from jaxshare.serving.grammars.places import GrammarPlaces
from jaxshare.serving.grammars.server import MatcherServer
from tests.helpers import one_layer

MODEL, ROWS = one_layer(), 4
VOCAB = MODEL.config.vocab_size
HOST = Grammar.json_schema({"type": "object"})
WORDS = [Grammar.choices([f"{word} one", f"{word} two"]) for word in ("a", "bee", "sea")]


def compiled(grammar: Grammar) -> CompiledGrammar:
    made = compile_grammar(MODEL, SamplingParams(grammar=grammar))
    assert made
    return made


def bits(words) -> list[int]:
    return np.flatnonzero(
        np.unpackbits(np.asarray(words).view(np.uint8), bitorder="little")
    ).tolist()


def expected(grammar: CompiledGrammar, tokens) -> list[int]:
    """The tokens that llguidance admits, or the one that it forces."""
    matcher = grammar.matcher(tokens)
    if forced := matcher.compute_ff_tokens():
        return forced[:1]
    words = llguidance.numpy.allocate_token_bitmask(1, VOCAB)
    llguidance.numpy.fill_next_token_bitmask(matcher, words)
    return bits(words[0])


def text(words: str) -> list[int]:
    return compiled(HOST).vocabulary.reader.tokenize_str(words)


def test_a_server_has_the_mask_of_each_row_as_they_read_move_and_leave():
    server, grammar = MatcherServer(VOCAB), compiled(HOST)
    outputs = {0: "", 2: '{"a', 3: '{"a": 12'}
    for row, words in outputs.items():
        server.enter(row, grammar, text(words))
    everything = [*range(-(-VOCAB // 32) * 32)]
    masks = server.masks(ROWS)
    assert [bits(mask) for mask in masks] == [
        expected(grammar, text(outputs[row])) if row in outputs else everything for row in range(4)
    ]
    server.move([3, 0])
    assert [bits(mask) for mask in server.masks(2)] == [
        expected(grammar, text(outputs[row])) for row in (3, 0)
    ]
    tokens = np.asarray([*text("3"), *text("{")])
    forced, count = server.advance(tokens, np.asarray([True, True]), np.zeros(2, int), 0)
    assert not count.any() and not forced.any()
    assert bits(server.masks(2)[0]) == expected(grammar, text('{"a": 123'))
    assert bits(server.masks(2)[1]) == expected(grammar, text("{"))
    server.leave(0)
    assert bits(server.masks(2)[0]) == everything


def test_a_row_enters_in_the_midst_of_forced_tokens_where_it_was():
    grammar = compiled(
        Grammar.json_schema(
            {
                "type": "object",
                "properties": {"a_long_name_of_one": {"type": "integer", "minimum": 3}},
                "required": ["a_long_name_of_one"],
                "additionalProperties": False,
            }
        )
    )
    assert grammar.table is None
    whole = text('{"a_long_name_of_one":4')
    for count in range(len(whole) + 1):
        server = MatcherServer(VOCAB)
        server.enter(0, grammar, whole[:count])
        found = bits(server.masks(1)[0])
        assert count == len(whole) or whole[count] in found


def test_tables_are_put_once_and_make_room_when_no_row_uses_them(monkeypatch):
    made = [*map(compiled, WORDS)]
    whole = GrammarPlaces(VOCAB)
    states = [whole.enter(row, grammar, []) for row, grammar in enumerate(made)]
    assert len({*states}) == 3 and whole.enter(3, made[0], []) == states[0]
    rows = whole.put(GrammarRows.none(ROWS, VOCAB))
    assert whole.put(rows) is rows  # nothing has changed
    for state, grammar in zip(states, made, strict=True):
        assert grammar.table
        np.testing.assert_array_equal(rows.tables.masks[state], grammar.table.masks()[0])
    one = 4 * 64 * (-(-VOCAB // 32) + 33) + 4 * 4 * VOCAB + 4 * 1024
    monkeypatch.setattr(places, "_MOST_BYTES", one)
    small = GrammarPlaces(VOCAB)
    first = small.enter(0, made[0], [])
    sizes = small.put(GrammarRows.none(ROWS, VOCAB)).tables.num_states
    assert first >= 0 and sizes == 64
    full = small.enter(1, compiled(Grammar.regex("[a-d]{60}")), [])
    assert full == SERVED  # no room while the first is in use
    small.leave(0)
    assert small.enter(0, compiled(Grammar.regex("[a-d]{50}")), []) >= 0
    assert small.enter(2, None, []) == NO_GRAMMAR


def test_states_go_on_from_an_output():
    made, whole = compiled(WORDS[1]), GrammarPlaces(VOCAB)
    assert made.table
    tokens = made.vocabulary.reader.tokenize_str("bee two")
    state = whole.enter(0, made, tokens[:3])
    rows = whole.put(GrammarRows.none(ROWS, VOCAB))
    np.testing.assert_array_equal(
        jax.device_get(rows.tables.masks[state]), made.table.masks()[made.table.read(tokens[:3])]
    )


@pytest.mark.parametrize("words", ['{"a" x', "[1]"])
def test_a_row_that_has_read_what_is_not_admitted_admits_nothing(words):
    server = MatcherServer(VOCAB)
    server.enter(0, compiled(HOST), text(words))
    assert bits(server.masks(1)[0]) == [] and server.error(0)
