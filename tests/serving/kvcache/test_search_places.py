"""Branches of searches that are over: by the tokens of what the search may still ask, on random
searches; and on an engine, what leaves a small memory first."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare.serving.kvcache import search_places
from jaxshare.serving.kvcache.policy import Policy, SearchPlace, Segment
from jaxshare.serving.kvcache.search_places import SearchPlaces
from scripts.bench.parts.residency.tree import Tree
from scripts.bench.parts.residency.workflow import Call
from tests.serving.engine.stepped import small_pieces
from tests.serving.engine.test_engine import Stepped, done, lasting

__all__ = ["small_pieces"]  # the fixture

RULES = (900, 901)


class Placed(Policy):
    """Keeps everything; tells places where the requests are that the test makes."""

    def __init__(self):
        self.places = SearchPlaces()
        self.given: tuple[SearchPlace | None, int] = (None, 0)

    def observe(self, observation):
        self.places.observe(*self.given, observation.now)

    def touched(self, segment, now):
        self.places.touched(segment, now)

    def split(self, head, tail):
        self.places.split(head, tail)

    def rank(self, segment, now):
        raise AssertionError("nothing is evicted")


class Search:
    """A search of made-up answers, whose dialogues are tokens.

    Attributes:
      dialogues: the tokens of each node; open: the nodes that it may still ask at.
    """

    def __init__(self, name, rng):
        self.name, self.rng = name, rng
        self.dialogues, self.open, self.fired = {(): RULES}, [()], {}

    def prompt(self, node):
        return (*self.dialogues[node], 500 + len(node), 600 + len(node))

    def ask(self):
        """(the tokens of prompt and answer, the prompt's length, the place) of a next call."""
        node = self.rng.choice(self.open)
        answer = (*node, self.fired.get(node, 0))
        self.fired[node] = answer[-1] + 1
        # Answers may begin alike, but no two are the same.
        number = 1000 + len(self.dialogues)
        said = (*(self.rng.randrange(2) for _ in range(self.rng.randrange(3))), number)
        self.dialogues[answer] = (*self.prompt(node), *said)
        self.open.append(answer)
        place = SearchPlace(self.name, node, answer, tuple(self.open))
        return self.dialogues[answer], len(self.prompt(node)), place

    def prune(self):
        kept = [node for node in self.open if self.rng.random() < 0.6]
        self.open = kept or self.open[-1:]


def expected_over(begin, users, needed):
    """Whether the tokens that end so are over: by what the searches may still ask.

    Args:
      begin: the tokens up to the first of the segment.
      users: (prompt length, place) of each request with these tokens.
      needed: for each run the prompts that it may still ask.
    """
    runs = {place and place.run for _, place in users}
    if len(runs) > 1 or None in runs:
        return False
    if any(place.node == () and len(begin) <= prompt for prompt, place in users):
        return False
    return not any(prompt[: len(begin)] == begin for prompt in needed[runs.pop()])


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_a_segment_is_over_where_nothing_that_may_be_asked_begins_with_it(seed):
    rng = random.Random(seed)
    policy = Placed()
    tree = Tree(10**6, policy)
    searches = [Search("one", rng), Search("two", rng)]
    asked, needed = [], {}
    for now in range(30):
        search = rng.choice(searches)
        if rng.random() < 0.1:  # something without a place that has read a part of it
            tokens = rng.choice([*search.dialogues.values()])
            given_place, prompt = None, len(tokens)
        else:
            tokens, prompt, given_place = search.ask()
            needed[search.name] = [search.prompt(node) for node in given_place.open]
        policy.given = given_place, prompt
        tree.admit(Call("agent", tokens), now)
        asked.append((tokens, prompt, given_place))
        check(tree, policy, asked, needed)
        search.prune()
    assert tree.size > 50


def check(tree, policy, asked, needed):
    nodes = [((), node) for node in tree._root.children.values()]
    while nodes:
        begin, node = nodes.pop()
        whole = (*begin, *node.tokens.tolist())
        first = whole[: len(begin) + 1]
        users = [(prompt, place) for all, prompt, place in asked if all[: len(whole)] == whole]
        assert users and policy.places.is_over(node.segment) == expected_over(first, users, needed)
        nodes += [(whole, child) for child in node.children.values()]


def test_runs_beyond_the_most_that_are_followed_are_forgotten(monkeypatch):
    monkeypatch.setattr(search_places, "MOST_RUNS", 2)
    places, segments = SearchPlaces(), {}

    def ask(run, now, open):
        segment = segments.setdefault(run, Segment(4, b"", 8, {}))
        places.observe(SearchPlace(run, (0,), (0, 0), open), 8, now)
        places.touched(segment, now)

    for now, run in enumerate("abc"):
        ask(run, now, ((0,),))
    # Run a is not followed any more, so nothing is known of what it has used.
    ask("b", 3, ((1,),))
    assert [places.is_over(segments[run]) for run in "abc"] == [False, True, False]
    ask("a", 4, ((1,),))
    assert not places.is_over(segments["a"])
    places.evicted(segments["b"])
    assert not places.is_over(segments["b"])


def watched(engine):
    """Notes of each eviction whether it was of what is over, and whether anything else that was
    over could have left instead."""
    tree, notes = engine._scheduler.kv.tree, []
    policy, evict = tree.policy, tree.evict_node

    def evict_node(node, worth_a_copy):
        is_over = policy._places.is_over
        others = [each for each in tree.root.subtree() if each.evictable and each is not node]
        notes.append((is_over(node.segment), any(is_over(each.segment) for each in others)))
        evict(node, worth_a_copy)

    tree.evict_node = evict_node
    return notes


def searched(*, placed, host=0):
    """Three answers to a question, each of which is gone on from twice; then the search keeps two
    branches and asks in the second, while other agents need room.

    Returns the engine, notes of evictions, the dialogues by node, what others have asked, and the
    outputs.
    """
    engine = Stepped(512, host)
    notes = watched(engine)
    dialogues, outputs = {(): lasting(64, 8, seed=1)}, []

    def ask(node, number, open, more):
        answer = (*node, number)
        prompt = [*dialogues[node], *more]
        place = SearchPlace("run", node, answer, open) if placed else None
        stream = engine.submit(prompt, max_new_tokens=8, agent_id="searcher", place=place)
        engine.settle()
        outputs.append(done(stream).tokens)
        dialogues[answer] = [*prompt, *outputs[-1], *([3 + number] * 40)]  # what it is told

    for number in range(3):
        ask((), number, ((),), [])
    for level in range(2):
        for number in range(3):
            ask((number,), level, ((0,), (1,), (2,)), [17 + level] * 8)
    ask((1, 1), 0, ((0, 1), (1, 1, 0)), [])
    others = [lasting(60, 8, seed=10 + number) for number in range(4)]
    for number, prompt in enumerate(others):
        stream = engine.submit(prompt, max_new_tokens=8, agent_id=f"other {number}")
        engine.settle()
        outputs.append(done(stream).tokens)
    return engine, notes, dialogues, others, outputs


def cached(engine, tokens):
    return engine._scheduler.kv.tree.match(tokens, len(tokens)).tokens


def test_a_small_memory_loses_what_is_over_before_what_may_be_asked():
    engine, notes, dialogues, others, outputs = searched(placed=True)
    assert (True, True) in notes and (False, False) in notes and (False, True) not in notes
    blind, _, same, _, expected = searched(placed=False)
    assert outputs == expected and same == dialogues
    # What the search may come back to is all there, but for the last token and what follows it.
    asked = len(dialogues[0, 1]) - 41
    assert cached(engine, dialogues[0, 1]) == cached(blind, dialogues[0, 1]) == asked
    # The branch that is over has left for what others have asked.
    assert cached(engine, dialogues[2, 1]) < asked == cached(blind, dialogues[2, 1])
    kept, less = (sum(cached(each, prompt) for prompt in others) for each in (engine, blind))
    assert kept > less


def test_what_is_over_is_not_copied_to_the_host():
    engine, notes, dialogues, _, _ = searched(placed=True, host=512)
    tree = engine._scheduler.kv.tree
    assert any(is_over for is_over, _ in notes) and not all(is_over for is_over, _ in notes)
    assert 0 < tree.swapped < tree.evicted and tree.dropped == tree.evicted - tree.swapped
    assert cached(engine, dialogues[2, 1]) < cached(engine, dialogues[0, 1])


def test_a_place_is_checked_before_anything_runs():
    engine = Stepped(512)
    with pytest.raises(TypeError, match="place is 3; it must be a SearchPlace"):
        engine.submit([5, 6], place=3)
    assert not engine.step()
    place = SearchPlace("run", (), (0,), ((0,),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        place.run = "other"
