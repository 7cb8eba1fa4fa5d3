"""Patterns as automata over bytes, against Python's own regular expressions."""

import json
import re
import string

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxshare.serving.grammars.byte_grammar import MOST_STATES, ByteGrammar, byte_grammar
from jaxshare.serving.grammars.patterns import BeyondError, Characters, choice, read_regex


def accepts(grammar: ByteGrammar, text: str) -> bool:
    state = grammar.start
    for byte in text.encode():
        state = int(grammar.transitions[state, byte])
        if state < 0:
            return False
    return bool(grammar.accepting[state])


ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "ab",
        ".",
        "[ab]",
        "[^a]",
        "[a-cx]",
        r"\.",
        r"\d",
        r"\D",
        r"[^\d]",
        "é",
        "[à-ü€]",
        "-",
    ]
)
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}", "*?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)
TEXTS = st.text("ab.cx-1٣éü€\n", max_size=6)


@settings(max_examples=300)
@given(REGEXES, st.lists(TEXTS, min_size=1, max_size=12))
def test_an_automaton_accepts_what_python_matches(pattern, texts):
    try:
        grammar = byte_grammar(read_regex(pattern))
    except BeyondError:
        assume(False)
        raise
    for text in ["", *texts]:
        assert accepts(grammar, text) == bool(re.fullmatch(pattern, text)), (pattern, text)


@given(st.text(string.printable, max_size=8), st.text(string.printable, max_size=4))
def test_any_text_as_a_pattern_is_read_as_python_reads_it_or_refused(pattern, text):
    try:
        grammar = byte_grammar(read_regex(pattern))
    except BeyondError:
        return
    try:
        expected = bool(re.fullmatch(pattern, text))
    except re.error:
        return  # Rust reads more than Python, such as x**
    assert accepts(grammar, text) == expected or re.search(r"\\s|\\S", pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *("^a$", "(?i)a", "(?=a)b", "(?<!a)b", r"\bword", r"\w", r"\pL", "[[:alpha:]]", "[a&&b]"),
        *("(a", "a)", "[a", "*", "a{2", "a{1001}", r"\1", r"\q", "[]a]", "a{3,2}", "a{,2}"),
        "(" * 5000,
    ],
)
def test_what_is_beyond_is_refused(pattern):
    with pytest.raises(BeyondError):
        byte_grammar(read_regex(pattern))


@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF))
def test_a_range_of_characters_has_the_bytes_of_each_of_them_and_of_no_other(a, b):
    first, last = sorted((a, b))
    characters = Characters.of([(first, last)])
    assume(characters.ranges)
    grammar = byte_grammar(characters)
    edges = {first - 1, first, first + 1, (first + last) // 2, last - 1, last, last + 1}
    edges |= {0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF}
    for code in edges:
        if 0 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF:
            assert accepts(grammar, chr(code)) == (first <= code <= last), hex(code)


def test_the_automaton_has_no_more_states_than_there_are_kinds_of_continuations():
    texts = ["yes", "yet", "no", "net", "net work"]
    rests = {
        frozenset(t[n:] for t in texts if t.startswith(begin))
        for t in texts
        for n in range(len(t) + 1)
        for begin in [t[:n]]
    }
    grammar = byte_grammar(choice(texts))
    assert len(grammar.transitions) == len(rests)
    for text in [*texts, "ye", "nets", "", "netw"]:
        assert accepts(grammar, text) == (text in texts)


def test_a_large_pattern_is_refused_and_not_computed_for_long():
    with pytest.raises(BeyondError):
        byte_grammar(read_regex("[ab]*a[ab]{20}"))
    with pytest.raises(BeyondError):
        byte_grammar(read_regex("(a{900}){900}"))
    largest = read_regex(f"a{{1000}}b{{{MOST_STATES - 1001}}}")
    assert len(byte_grammar(largest).transitions) == MOST_STATES
    with pytest.raises(BeyondError):
        byte_grammar(read_regex("a{1000}b{30}"))


def test_bytes_that_must_come_are_found_up_to_where_the_text_may_part_or_end():
    grammar = byte_grammar(choice(["abc", "abd", "xyz", "xyzé"]))
    assert grammar.certain(grammar.start) == (b"", False)
    after_a, after_x = (int(grammar.transitions[grammar.start, ord(c)]) for c in "ax")
    assert grammar.certain(after_a) == (b"b", False)
    assert grammar.certain(after_x) == (b"yz", False)
    whole = byte_grammar(choice([json.dumps("é")]))
    assert whole.certain(whole.start) == (json.dumps("é").encode(), True)
    assert np.count_nonzero(whole.accepting) == 1
