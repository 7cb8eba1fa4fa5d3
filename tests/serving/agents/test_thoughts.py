"""Tree of Thoughts with votes and with several evaluations, against enumerations of small trees."""

import asyncio
import itertools

import pytest

from jaxshare.serving.agents import (
    AgentError,
    BestOfN,
    Budget,
    ForestOfThoughts,
    Judged,
    Reply,
    Runtime,
    TreeOfThoughts,
    agent,
    choose,
    llm,
)
from jaxshare.serving.agents.journal import Journal
from tests.serving.agents.test_search import BranchError


class Letters:
    """Answers with a letter for each firing; a judge's calls get their answers from a function."""

    def __init__(self, judged=None):
        self.judged, self.calls = judged, []

    async def answer(self, call):
        self.calls.append(call)
        if call.agent == "composes":
            return Reply("abcdef"[call.state[-1]])
        assert self.judged is not None
        return Reply(self.judged(call))


@agent
async def composes(length, short=()):
    text = ""
    while len(text) < length:
        text += await llm(f"after {text}")
        if text == "c":
            raise BranchError(text)
        if text in short:
            break
    return text


def text_of(judged):
    return judged.value if judged.finished else judged.variables["text"]


def merit(text):
    return (sum(ord(letter) * (i + 3) for i, letter in enumerate(text)) * 7919) % 101


def ballots(texts, voters):
    """The votes on texts: each voter has an order of its own."""
    return [max(texts, key=lambda text: (merit(text + str(voter)), text)) for voter in voters]


def voting_oracle(length, breadth, keep, voters, short=()):
    """Breadth-first search by votes: (answer, texts that were voted on)."""
    level, met, groups = [""], [], []
    while level:
        came = [text + letter for text in level for letter in "abcdef"[:breadth]]
        came = sorted(text for text in came if text != "c")  # the order of the tree
        if len(came) > 1:
            met.append(came)
            votes = ballots(came, voters)
        else:
            votes = came
        ranked = sorted(came, key=lambda text: (-votes.count(text), came.index(text)))
        ended = [text for text in ranked if len(text) == length or text in short]
        groups += [ended] if ended else []
        level = [text for text in ranked if text not in ended][:keep]
    if len(groups) == 1:
        return groups[0][0], met
    every = sorted(itertools.chain(*groups))
    met.append(every)
    votes = ballots(every, voters)
    return max(every, key=lambda text: (votes.count(text), -every.index(text))), met


class Voters:
    """Votes by a function, each time as the next voter."""

    def __init__(self, voters):
        self.voters, self.met = voters, []

    def __call__(self, states):
        assert all(isinstance(state, Judged) for state in states)
        texts = [text_of(state) for state in states]
        if not self.met or self.met[-1][0] != texts:
            self.met.append((texts, iter(range(self.voters))))
        [vote] = ballots(texts, [next(self.met[-1][1])])
        return texts.index(vote)


SHAPES = [(1, 1, 1), (2, 1, 3), (3, 2, 1), (3, 2, 5), (4, 5, 3)]


@pytest.mark.parametrize("short", [(), ("a", "bb")])
@pytest.mark.parametrize(("breadth", "keep", "votes"), SHAPES)
def test_votes_of_a_function(breadth, keep, votes, short):
    voters = Voters(votes)
    supervisor = TreeOfThoughts(breadth, keep, vote=voters, evaluations=votes)
    done = asyncio.run(Runtime(Letters()).run(composes.under(supervisor), 3, short))
    answer, met = voting_oracle(3, breadth, keep, range(votes), short)
    assert done.accepted.value == answer
    assert [texts for texts, _ in voters.met] == met


@agent
async def votes_once(states):
    texts = [text_of(state) for state in states]
    return texts.index(await llm(" ".join(texts)))


@agent
async def votes_often(states):
    texts = [text_of(state) for state in states]
    return [texts.index(text) for text in await llm(" ".join(texts), n=3)]


def test_votes_of_agents_are_children_with_calls_of_their_own():
    # Three voters, of which each knows its own number by the id of its run.
    def vote(call):
        number = (-2 - int(call.run.rpartition(".")[2])) // 4
        texts = call.messages[-1].content.split()
        return ballots(texts, [number])[0]

    model = Letters(vote)
    supervisor = TreeOfThoughts(4, 2, vote=votes_once, evaluations=3)
    done = asyncio.run(Runtime(model).run(composes.under(supervisor), 3))
    answer, met = voting_oracle(3, 4, 2, range(3))
    assert done.accepted.value == answer
    assert [child.agent.name for child in done.children] == ["votes_once"] * 3 * len(met)
    assert len({call.seed for call in model.calls}) == len(model.calls)
    assert len({child.id for child in done.children}) == len(done.children)


def test_one_agent_can_give_several_votes():
    order = itertools.cycle(range(3))
    model = Letters(lambda call: ballots(call.messages[-1].content.split(), [next(order)])[0])
    supervisor = TreeOfThoughts(4, 2, vote=votes_often)
    done = asyncio.run(Runtime(model).run(composes.under(supervisor), 3))
    answer, met = voting_oracle(3, 4, 2, range(3))
    assert done.accepted.value == answer and len(done.children) == len(met)
    scores = sorted(state.score for state in done.states if state.score is not None)
    assert {round(3 * score, 9) for score in scores} <= {0, 1, 2, 3}


def test_depth_first_by_votes_goes_to_the_best_child_first():
    voters = Voters(1)
    supervisor = TreeOfThoughts(2, 2, vote=voters, depth_first=True)
    done = asyncio.run(Runtime(Letters()).run(composes.under(supervisor), 3))
    text = ""
    for _ in range(3):
        [text] = ballots([text + letter for letter in "ab"], [0])
    assert done.accepted.value == text
    assert done.calls == 6


def test_scores_from_votes_prune_and_are_enough():
    first = TreeOfThoughts(3, 3, vote=lambda states: [0, 1, 0, 0], prune=0.25)
    done = asyncio.run(Runtime(Letters()).run(composes.under(first), 2))
    # "c" has failed; the four states below a and b have shares of 3, 1, 0, ... quarters.
    assert done.accepted.value == "aa" and done.accepted.score == 0.75
    kept = [state for state in done.states if state.path[:1] == (0,) and len(state.path) == 2]
    assert [state.fired for state in sorted(kept, key=lambda state: state.path)] == [3, 3, 0]


# Errors of votes.


def test_a_vote_that_fails_is_in_the_tree_and_the_others_count():
    def vote(states):
        vote.times += 1
        if vote.times == 1:
            raise BranchError("no vote")
        return 1

    vote.times = 0
    supervisor = TreeOfThoughts(2, 1, vote=vote, evaluations=2)
    done = asyncio.run(Runtime(Letters()).run(composes.under(supervisor), 1))
    assert done.accepted.value == "b"
    [failed] = [state for state in done.states if state.error]
    assert isinstance(failed.error, BranchError)
    assert failed.parent is not None and failed.parent.value == "a"
    assert failed.error.__notes__ == [
        "in the vote of TreeOfThoughts, the supervisor of agent composes,"
    ]


@agent
async def fails(states):
    raise BranchError(f"{len(states)} are too many")


@pytest.mark.parametrize("vote", [fails, lambda states: 1 / 0])
def test_where_all_votes_fail_the_error_is_that_of_the_first(vote):
    with pytest.raises((BranchError, ZeroDivisionError)) as caught:
        asyncio.run(
            Runtime(Letters()).run(
                composes.under(TreeOfThoughts(2, 1, vote=vote, evaluations=3)), 2
            )
        )
    assert "in the vote of TreeOfThoughts" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("given", [2, -1, True, "0", None, [], [0, 5], 0.0])
def test_a_vote_for_no_state_is_an_error_that_says_so(given):
    with pytest.raises(AgentError, match=r"the vote is .*; give the index of one of the 2 states"):
        asyncio.run(
            Runtime(Letters()).run(composes.under(TreeOfThoughts(2, 1, vote=lambda _: given)), 1)
        )


def test_value_and_vote_are_two_ways():
    with pytest.raises(ValueError, match="value and vote both evaluate states"):
        TreeOfThoughts(2, 1, len, vote=len)
    with pytest.raises(ValueError, match="generate is 'both'; give 'sample' or 'propose'"):
        TreeOfThoughts(2, 1, generate="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="evaluations is 0"):
        TreeOfThoughts(2, 1, evaluations=0)


def test_a_budget_that_ends_during_a_vote_leaves_the_best_so_far():
    model = Letters(lambda call: "a")
    supervisor = TreeOfThoughts(2, 1, vote=votes_once, budget=Budget(calls=2))
    with pytest.raises(AgentError, match="budget"):
        asyncio.run(Runtime(model).run(composes.under(supervisor), 2))
    assert len(model.calls) == 2


# Several evaluations.


def test_the_score_is_the_mean_of_the_evaluations():
    def value(state):
        value.times[state.path] = value.times.get(state.path, 0) + 1
        return merit(text_of(Judged.of(state))) * value.times[state.path]

    value.times = {}
    for supervisor in (
        TreeOfThoughts(2, 2, value, evaluations=3),
        BestOfN(2, value, evaluations=3),
    ):
        value.times.clear()
        done = asyncio.run(Runtime(Letters()).run(composes.under(supervisor), 2))
        scored = [state for state in done.states if state.score is not None]
        assert scored and {value.times[state.path] for state in scored} == {3}
        for state in scored:
            assert state.score == pytest.approx(2 * merit(text_of(Judged.of(state))))


@agent
async def judges(judged):
    return float(await llm(text_of(judged)))


def test_evaluations_by_an_agent_are_several_answers():
    def judged(call):
        return str(merit(call.messages[-1].content) + call.seed % 7)

    model = Letters(judged)
    supervisor = TreeOfThoughts(2, 1, judges, evaluations=4)
    done = asyncio.run(Runtime(model).run(composes.under(supervisor), 2))
    for state in done.states:
        if state.score is None:
            continue
        place = ".".join(map(str, state.path))  # in the ids of its judges
        given = [
            merit(call.messages[-1].content) + call.seed % 7
            for call in model.calls
            if call.run.partition("@")[2].partition("#")[0] == place
        ]
        assert len(given) == 4 and state.score == sum(given) / 4
    assert len({call.seed for call in model.calls}) == len(model.calls)


# Votes and proposals in forests, where several trees ask at once.


class Proposals:
    async def answer(self, call):
        await asyncio.sleep(0.001 * (call.seed % 3))
        return Reply(f"{call.seed % 7} {call.seed % 5}")


@agent
async def proposes():
    found = []
    for _ in range(2):
        found.append(int(await choose(await llm(f"{found}", parse=str.split))))
    return found


def test_a_forest_of_voting_and_proposing_trees_is_the_same_every_time():
    def vote(states):
        texts = [str(state.value or state.variables["found"]) for state in states]
        return texts.index(max(texts, key=merit))

    tree = TreeOfThoughts(3, 2, vote=vote, generate="propose")
    ends = set()
    for _ in range(3):
        done = asyncio.run(
            Runtime(Proposals()).run(proposes.under(ForestOfThoughts(tree, 3, key=str)))
        )
        ends.add((str(done.accepted.value), done.accepted.path, done.calls))
    assert len(ends) == 1


@agent
async def votes_for_numbers(states):
    texts = [str(state.value or state.variables["found"]) for state in states]
    await llm("which?")
    return texts.index(max(texts, key=merit))


def test_a_journal_replays_votes_and_proposals(tmp_path):
    tree = TreeOfThoughts(3, 2, vote=votes_for_numbers, evaluations=2, generate="propose")
    which, journal = proposes.under(ForestOfThoughts(tree, 3, key=str)), Journal()
    done = asyncio.run(Runtime(Proposals(), journal=journal).run(which))
    journal.save(tmp_path / "run.json")
    strict = Journal.load(tmp_path / "run.json", strict=True)
    again = asyncio.run(Runtime(None, journal=strict).run(which))  # type: ignore[arg-type]
    assert (again.accepted.value, again.accepted.path) == (done.accepted.value, done.accepted.path)
    assert (again.total, again.accepted.score) == (done.total, done.accepted.score)
