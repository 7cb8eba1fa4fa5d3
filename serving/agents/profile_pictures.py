"""Pictures of how agents work together, and of what they cost and contribute, in the forms of
figures 3, 4 and 9 of Hive."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxshare.serving.agents.search_log import LoggedRun, SearchLog, empty_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Shares = Sequence[tuple[float, Mapping[str, float]]]
"""(seconds, the contribution of each active agent), in the order of time."""


def costs_by_agent(log: SearchLog) -> dict[str, tuple[int, int]]:
    """(model calls, tokens read and written) of each agent, the most tokens first."""
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for run in log.runs:
        counts[run.agent][0] += run.calls
        counts[run.agent][1] += run.prompt_tokens + run.new_tokens
    ordered = sorted(counts.items(), key=lambda item: (-item[1][1], item[0]))
    return {agent: (calls, tokens) for agent, (calls, tokens) in ordered}


@dataclasses.dataclass(frozen=True)
class _AgentWork:
    """Uninterrupted work of one agent: a model call of a run, or a part of a run that it spawned.

    Attributes:
      agent: that did it; run: the id of its run.
      began, ended: in seconds since the runtime's start.
    """

    agent: str
    run: str
    began: float
    ended: float


def flows(log: SearchLog) -> dict[tuple[str, str], int]:
    """How often the work went from one agent to another, the most frequent first.

    The works within a run are its own model calls and the runs that it has spawned, those that yield
    from each resume to the next yield; the run itself begins before them and ends after them. From
    each of them the work goes on to those that began after its end, if nothing else began and ended
    in between: from works side by side it goes on from each. What a run does by itself, one call
    after the other, goes nowhere.
    """
    counts: dict[tuple[str, str], int] = collections.Counter()
    spawned: dict[str, list[LoggedRun]] = collections.defaultdict(list)
    for run in log.runs:
        if run.parent is not None:
            spawned[run.parent].append(run)
    for run in log.runs:
        children = spawned[run.id]
        works = [work for child in children for work in _parts(child)]
        works += _calls(run, children, works)
        works.sort(key=lambda work: (work.began, work.ended))
        first = _AgentWork(run.agent, run.id, -math.inf, -math.inf)
        last = _AgentWork(run.agent, run.id, math.inf, math.inf)
        for work, after in _successions([first, *works, last]):
            if work.run != after.run:
                counts[work.agent, after.agent] += 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _calls(
    run: LoggedRun, children: Sequence[LoggedRun], parts: Sequence[_AgentWork]
) -> list[_AgentWork]:
    """A run's own model calls, each until its code spawns or resumes something after it.

    Args:
      parts: the works of the children.
    """
    waits = {state.path: state.waits_for for state in run.states}
    spawned: dict[str, float] = {}  # by the firing, as in the ids of runs
    for child in reversed(children):
        place = child.id.removeprefix(f"{run.id}/{child.agent}@")
        spawned[place.split("#")[0].split("~")[0]] = child.began
    begins = [part.began for part in parts] if _has_one_path(run) else []
    return [
        _AgentWork(
            run.agent,
            run.id,
            state.began,
            min(
                state.ended,
                spawned.get(".".join(map(str, state.path)), math.inf),
                min((began for began in begins if began >= state.began), default=math.inf),
            ),
        )
        for state in run.states
        if state.parent is not None and waits[state.parent] == "llm"
    ]


def _parts(run: LoggedRun) -> list[_AgentWork]:
    """The parts of a run between the yields of its one path; all of it where there are several."""
    went_on = {state.parent: state.began for state in run.states}
    works, began = [], run.began
    for state in run.states if _has_one_path(run) else ():
        if state.waits_for == "yield":
            works.append(_AgentWork(run.agent, run.id, began, state.ended))
            began = went_on.get(state.path, math.inf)
    if began <= run.ended:
        works.append(_AgentWork(run.agent, run.id, began, run.ended))
    return works


def _has_one_path(run: LoggedRun) -> bool:
    return all(state.fired <= 1 for state in run.states)


def _successions(works: Sequence[_AgentWork]) -> list[tuple[_AgentWork, _AgentWork]]:
    """Pairs of works of which the second began after the first, with nothing whole in between.

    Args:
      works: in the order of their begins.
    """
    found = []
    for index, work in enumerate(works):
        between: float | None = None  # the first end of those that have begun after it
        for after in works[index + 1 :]:
            if between is not None and after.began >= between:
                break
            if after.began >= work.ended:
                found.append((work, after))
                between = after.ended if between is None else min(between, after.ended)
    return found


_HOT = 0.7
"""The part of all model calls that hot agents have together; Hive says of its own agents that a
subset has more than 70%."""


def hot_agents(log: SearchLog) -> set[str]:
    """The fewest agents that together have 70% of all model calls."""
    calls = {agent: calls for agent, (calls, _) in costs_by_agent(log).items()}
    hot, left = set[str](), _HOT * sum(calls.values())
    for agent in sorted(calls, key=lambda agent: (-calls[agent], agent)):
        if left <= 0:
            break
        hot.add(agent)
        left -= calls[agent]
    return hot


def workflow_picture(log: SearchLog) -> "Figure":
    """The agents, and how often the work went from one to another (compare figure 3 of Hive).

    Hot agents stand out; the area of a circle is for the agent's model calls.

    Raises:
      ImportError: matplotlib is not installed.
    """
    agents = list(dict.fromkeys(run.agent for run in log.runs))
    calls = {agent: calls for agent, (calls, _) in costs_by_agent(log).items()}
    figure, hot = empty_figure(6.4, 5.8), hot_agents(log)
    ax, most = figure.add_subplot(), max(calls.values(), default=0) or 1
    places = {
        agent: (
            math.sin(math.tau * number / len(agents)),
            math.cos(math.tau * number / len(agents)),
        )
        for number, agent in enumerate(agents)
    }
    radii = {agent: 17 + 15 * math.sqrt(calls[agent] / most) for agent in agents}
    _draw_flows(ax, flows(log), places, radii)
    for agent, place in places.items():
        colour = "#E69F00" if agent in hot else "#CCCCCC"
        area = math.pi * radii[agent] ** 2
        ax.scatter(*zip(place, strict=True), s=area, color=colour, zorder=3)
        label = f"{agent}\n{calls[agent]} call{'' if calls[agent] == 1 else 's'}"
        ax.annotate(label, place, ha="center", va="center", fontsize=8, zorder=4)
    ax.set(xlim=(-1.65, 1.65), ylim=(-1.65, 1.65), aspect="equal")  # loops are up to 1.5 outside
    ax.axis("off")
    ax.set_title("How the work goes from agent to agent", loc="left", fontsize=10.5)
    return figure


def _draw_flows(
    ax: "Axes",
    counts: Mapping[tuple[str, str], int],
    places: Mapping[str, tuple[float, float]],
    radii: Mapping[str, float],
) -> None:
    """Draws arrows with their numbers; the two directions between two agents are two arcs.

    Args:
      places: centres of the agents, about the middle of the picture; radii: in points.
    """
    from matplotlib.patches import FancyArrowPatch

    most = max(counts.values(), default=1)
    for (agent, after), count in counts.items():
        (x, y), (to_x, to_y) = places[agent], places[after]
        bend, shrink = -0.12, (radii[agent] + 1, radii[after] + 2)
        if agent == after:  # a loop on the outer side
            angle, bend, shrink = math.atan2(y, x), 1.4, (0, 0)
            (x, y), (to_x, to_y) = (
                (x + 0.27 * math.cos(angle + turn), y + 0.27 * math.sin(angle + turn))
                for turn in (-0.7, 0.7)
            )
        arrow = FancyArrowPatch(
            (x, y),
            (to_x, to_y),
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=12,
            shrinkA=shrink[0],
            shrinkB=shrink[1],
            linewidth=0.8 + 2.4 * count / most,
            color="#0072B2",
            label=f"{agent} to {after}",
            zorder=1,
        )
        ax.add_patch(arrow)
        # The middle of the arc: half of the bend away from the middle of the line.
        middle = (x + to_x + bend * (to_y - y)) / 2, (y + to_y - bend * (to_x - x)) / 2
        box = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"}
        ax.annotate(str(count), middle, ha="center", va="center", fontsize=8, bbox=box, zorder=2)


def profile_picture(log: SearchLog) -> "Figure":
    """The share of each agent in the calls and the tokens of all (compare figure 4 of Hive).

    Raises:
      ImportError: matplotlib is not installed.
    """
    costs = costs_by_agent(log)
    figure = empty_figure(7.0, 1.6 + 0.5 * len(costs))
    ax, places = figure.add_subplot(), range(len(costs))
    sides = (("calls", 0, -0.2, "#0072B2"), ("tokens", 1, 0.2, "#E69F00"))
    for label, side, offset, colour in sides:
        total = sum(cost[side] for cost in costs.values()) or 1
        shares = [100 * cost[side] / total for cost in costs.values()]
        ax.barh([place + offset for place in places], shares, 0.38, color=colour, label=label)
    ax.set_yticks(places, [*costs])
    ax.invert_yaxis()
    ax.set(xlabel="% of all agents", xlim=(0, 100))
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title("What each agent costs", loc="left", fontsize=10.5)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def contribution_picture(shares: Shares) -> "Figure":
    """The contribution of each agent over time (compare figure 9 of Hive).

    Args:
      shares: such as `EngineModel.contributions`.

    Raises:
      ImportError: matplotlib is not installed.
    """
    figure = empty_figure(7.0, 3.4)
    ax = figure.add_subplot()
    begin = shares[0][0] if shares else 0.0
    for agent in dict.fromkeys(agent for _, each in shares for agent in each):
        points = [(seconds - begin, each.get(agent, 0.0)) for seconds, each in shares]
        ax.step(*zip(*points, strict=True), where="post", label=agent, linewidth=1.4)
    ax.set(xlabel="seconds", ylabel="contribution", ylim=(0, None))
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title("What each agent contributes", loc="left", fontsize=10.5)
    if shares:
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure
