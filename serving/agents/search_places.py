"""The place of a model call in the search of its run, for engines that share memory by it."""

from jaxshare.serving.agents.runs import AgentRun
from jaxshare.serving.agents.states import State
from jaxshare.serving.engine import SearchPlace

MOST_OPEN = 256
"""Open states of a search, at most; larger searches do not say where they are, since each of their
calls would list all of them."""


def search_place(run: AgentRun, state: State, answer: tuple[int, ...]) -> SearchPlace | None:
    """The place of a call that a firing of a state makes.

    Args:
      answer: the path of the state that the firing leads to.

    Returns:
      The place, or None: the supervisor may fire any state, or has too many to fire.
    """
    pending = run.supervisor.pending()
    if pending is None:
        return None
    still = [*pending, *run.under_way, *run.asleep]
    if len(still) > MOST_OPEN:
        return None
    nodes = dict.fromkeys(node_of(each) for each in still)
    return SearchPlace(run.id, node_of(state), answer, tuple(nodes))


def node_of(state: State) -> tuple[int, ...]:
    """The node of the search tree that a state belongs to: the last one that a firing of a state
    that branches has led to on its path; () before the first."""
    while state.parent is not None and not state.parent.branches:
        state = state.parent
    return () if state.parent is None else state.path
