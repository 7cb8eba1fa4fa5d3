"""Pictures of what agents cost and contribute, in the forms of figures 4 and 9 of Hive."""

import collections
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxshare.serving.agents.search_log import SearchLog, empty_figure

if TYPE_CHECKING:
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
