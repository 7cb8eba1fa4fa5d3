"""Automata over bytes as tables over the tokens of a vocabulary."""

import numpy as np

from jaxshare.decoding.automaton import ByteAutomaton
from jaxshare.decoding.grammar_tables import GrammarTable
from jaxshare.serving.grammars.byte_grammar import MOST_STATES, ByteGrammar
from jaxshare.serving.grammars.vocabulary import GrammarVocabulary

_MOST_ENTRIES = 2**20


def token_table(grammar: ByteGrammar, vocabulary: GrammarVocabulary) -> GrammarTable | None:
    """A grammar over the tokens of a vocabulary; None if it is large.

    Of several ways to cut a text that must come into tokens, the tokenizer's own is admitted alone.

    Raises:
      ValueError: no text of the grammar can be made of the tokens.
    """
    states = len(grammar.transitions)
    dead, end = states, states + 1
    if end >= MOST_STATES:
        return None
    whole = np.full((states + 1, 256), dead, np.int32)
    whole[:states] = np.where(grammar.transitions < 0, dead, grammar.transitions)
    lifted = ByteAutomaton(whole, np.zeros_like(whole, bool), grammar.start).lift(vocabulary.tokens)
    classes, table = np.asarray(lifted.classes).copy(), np.asarray(lifted.transitions)
    num_classes = table.shape[1] + 2
    if (end + 1) * num_classes > _MOST_ENTRIES:
        return None
    transitions = np.full((end + 1, num_classes), -1, np.int32)
    transitions[:states, :-2] = np.where(table[:states] == dead, -1, table[:states])
    # Tokens without bytes are never admitted, and those that end a text where it may end.
    classes[[not token for token in vocabulary.tokens]] = num_classes - 2
    classes[[*vocabulary.stops]] = num_classes - 1
    transitions[:states, -1] = np.where(grammar.accepting, end, -1)
    used = np.isin(np.arange(num_classes), classes)
    transitions[:, ~used] = -1
    transitions = _without_dead_ends(transitions, end)
    classes, transitions = _with_forced(grammar, vocabulary, classes, transitions)
    if transitions.size > _MOST_ENTRIES:
        return None
    return _reachable(GrammarTable(classes, transitions, grammar.start))


def _without_dead_ends(transitions: np.ndarray, end: int) -> np.ndarray:
    """The transitions that lead to states from which the end can be reached."""
    lives = np.arange(len(transitions)) == end
    while True:
        leads = (transitions >= 0) & lives[transitions]
        more = lives | leads.any(axis=1)
        if (more == lives).all():
            return np.where(leads, transitions, -1)
        lives = more


def _with_forced(
    grammar: ByteGrammar, vocabulary: GrammarVocabulary, classes: np.ndarray, whole: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The classes and transitions where a state whose next bytes are certain admits one token."""
    only: dict[int, int] = {}
    for state in range(len(grammar.transitions)):
        text, ends = grammar.certain(state)
        token = vocabulary.first_forced(text, ends) if text else None
        if token is None or not text.startswith(vocabulary.tokens[token] or b"\xff"):
            continue
        if whole[state, classes[token]] >= 0:
            only[state] = token
    tokens = sorted({*only.values()})
    of_token = {token: whole.shape[1] + i for i, token in enumerate(tokens)}
    transitions = np.concatenate([whole, whole[:, classes[tokens]]], axis=1)
    for state, token in only.items():
        reached = transitions[state, of_token[token]]
        transitions[state] = -1
        transitions[state, of_token[token]] = reached
    classes = classes.copy()
    classes[tokens] = [of_token[token] for token in tokens]
    return classes, transitions


def _reachable(table: GrammarTable) -> GrammarTable:
    """The same table of the states that can be reached, and of the classes that differ."""
    found, place = [table.start], {table.start: 0}
    for state in found:  # grows as new states are found
        for reached in np.unique(table.transitions[state]).tolist():
            if reached >= 0 and reached not in place:
                place[reached] = len(found)
                found.append(reached)
    number = np.full(len(table.transitions) + 1, -1, np.int32)
    number[found] = np.arange(len(found))
    transitions = number[table.transitions[found]]
    columns, classes = np.unique(transitions, axis=1, return_inverse=True)
    return GrammarTable(
        classes.reshape(-1)[table.classes].astype(np.int32), columns.astype(np.int32)
    )
