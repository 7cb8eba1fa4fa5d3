"""Forks: a child goes on twice from where two paths of its parent begin to treat it differently.

A fork shares what the child has done, and searches on with a copy of its supervisor. Its states
are restored as those of any path are: from copies of frames, or by replays.
"""

import copy
import dataclasses
import hashlib
from collections.abc import Iterable

from jaxshare.serving.agents.channels import Channel
from jaxshare.serving.agents.courses import keep_frame
from jaxshare.serving.agents.errors import AgentError
from jaxshare.serving.agents.places import SHOWN
from jaxshare.serving.agents.runs import AgentRun, Host, check_limits
from jaxshare.serving.agents.states import Single, State, Supervisor


@dataclasses.dataclass
class Search:
    """A run's search at one time; all states are copies.

    Attributes:
      fired: the states of firings under way.
    """

    supervisor: Supervisor
    states: list[State]
    yields: list[State]
    asleep: list[State]
    fired_early: list[State]
    fired: list[State]


def keep_copy(run: AgentRun, resumes: int | None) -> None:
    """Keeps a copy of a run's search for forks, as it is after so many resumes, or at its end."""
    if resumes is None or type(run.supervisor) is not Single:  # of that, a yield says where it is
        run.copies[resumes] = _tried(_search_of(run), run.id)


def _search_of(run: AgentRun) -> Search:
    for state in [*run.states, *run.under_way.values()]:
        keep_frame(run, state)
    return Search(
        run.supervisor,
        run.states,
        run.yields,
        [*run.asleep],
        run.fired_early,
        [*run.under_way.values()],
    )


def fork(runtime: Host, channel: Channel, by: AgentRun, path: tuple[int, ...]) -> list[State]:
    """Gives a channel a run of its own, which is where the channel is.

    Returns:
      the states that are to be fired, since firings of them were under way.

    Raises:
      AgentError: the supervisor of the child cannot be copied, or there are too many agents.
    """
    old = channel.run
    check_limits(runtime, old.agent, by)
    made = AgentRun(runtime, _id(old, by, path), old.agent, old.supervisor, by, old.spawned_in)
    search = _parted(old, channel.resumes, made.id)
    if isinstance(search, Exception):
        raise AgentError(
            f"{type(old.supervisor).__name__}, the supervisor of agent {old.agent.name}, cannot be "
            f"copied ({search}), so two paths of {by.agent.name} cannot deal with the agent in "
            "different ways"
        ) from search
    made.supervisor, made.states, made.yields = search.supervisor, search.states, search.yields
    made.asleep, made.fired_early = dict.fromkeys(search.asleep), search.fired_early
    made.root, made.arguments, made.uncopied = old.root, old.arguments, old.uncopied
    made.began, made.resumes = old.began, channel.resumes
    made.owner = old.owner if old.owner in _owners(by) else by
    made.channel = made.driver = channel
    old.channels.pop(channel, None)
    made.channels[channel] = None
    channel.run = made
    channel.moved()
    return search.fired


def _parted(old: AgentRun, resumes: int, id: str) -> Search | Exception:
    """The search of a run for a fork with this id, as it was after so many resumes."""
    if type(old.supervisor) is Single and len(old.yields) > resumes:
        keep_frame(old, old.yields[resumes])
        at = dataclasses.replace(
            old.yields[resumes], run=id, course=None, children=None, arrived=None, fired=0
        )
        supervisor = old.agent.supervisor.begin()
        supervisor.init(at)
        supervisor.fire()  # it is asleep
        return Search(supervisor, [at], [*old.yields[:resumes], at], [at], [], [])
    if old.resumes == resumes and not old.is_called_off:
        return _tried(_search_of(old), id)
    kept = old.copies[resumes if old.resumes > resumes else None]
    return kept if isinstance(kept, Exception) else _tried(kept, id)


def _owners(run: AgentRun) -> list[AgentRun]:
    """A run and the runs above it that end it, which have not ended."""
    found: list[AgentRun] = []
    at: AgentRun | None = run
    while at is not None:
        found.append(at)
        at = at.owner
    return [one for one in found if not one.done]


def _id(old: AgentRun, by: AgentRun, path: tuple[int, ...]) -> str:
    """The id of a fork: that of the child, and the firing that makes it, or a digest of both."""
    above, slash, last = old.id.rpartition("/")
    child, is_fork, _ = last.partition("~")
    place = ".".join(map(str, path))
    if by is not old.parent or is_fork or len(path) > SHOWN:
        whole = f"{old.id} {by.id} {place}".encode()
        place = hashlib.blake2b(whole, digest_size=8).hexdigest()
    return f"{above}{slash}{child}~{place}"


def _tried(search: Search, run: str) -> Search | Exception:
    try:
        return _copied(search, run)
    except Exception as error:
        return error


def _copied(search: Search, run: str) -> Search:
    """A copy of a search whose states belong to a run with this id."""
    copies: dict[int, State] = {}
    for state in _with_parents([*search.states, *search.fired, *search.asleep]):
        made = dataclasses.replace(state, run=run, course=None, children=None)
        if state.parent is not None:
            made.parent = copies.get(id(state.parent), state.parent)
        copies[id(state)] = made
    for state in search.fired:
        copies[id(state)].fired -= 1  # it is fired again
    supervisor, memo = copy.copy(search.supervisor), dict(copies)
    for holder in (search.supervisor, getattr(search.supervisor, "tree", search.supervisor)):
        memo |= {id(value): value for value in vars(holder).values() if callable(value)}
    for name, value in vars(search.supervisor).items():
        if name not in ("value", "budget"):
            setattr(supervisor, name, copy.deepcopy(value, memo))  # type: ignore[arg-type]
    return Search(
        supervisor,
        *(
            [copies[id(state)] for state in states]
            for states in (
                search.states,
                search.yields,
                search.asleep,
                search.fired_early,
                search.fired,
            )
        ),
    )


def _with_parents(states: Iterable[State]) -> list[State]:
    """States after the states that led to them."""
    found: dict[State, None] = {}
    for state in states:
        path = []
        above: State | None = state
        while above is not None and above not in found:
            path.append(above)
            above = above.parent
        found.update(dict.fromkeys(reversed(path)))
    return list(found)
