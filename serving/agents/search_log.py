"""Search logs: the search trees and the timeline of finished agents, as JSON and as pictures.

    runtime = Runtime(model)
    asyncio.run(runtime.run(agent, ...))
    log = SearchLog.of(runtime)
    log.save("run.json")
    tree_picture(log.runs[0]).savefig("tree.png")
    timeline_picture(log).savefig("timeline.png")

A search log has the states that a supervisor accepted and pruned, and values of agents as text.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxshare.extras import figure_class
from jaxshare.models.config_fields import first_line
from jaxshare.paths import whole_file
from jaxshare.serving import checksums
from jaxshare.serving.agents.requests import (
    Ask,
    CallRun,
    ChildNext,
    ChildResult,
    Choose,
    Llm,
    Together,
    Tool,
    Yielded,
)
from jaxshare.serving.agents.runtime import AgentRun, Runtime
from jaxshare.serving.agents.states import State

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMAT = "jaxshare agents trace 1"
_MAX_CHARACTERS = 300
"""Limit of the text of a value or an error."""

# Colours of Okabe and Ito, distinct for colour-blind readers too, with a shape for each.
_FATE_STYLES: Mapping[str, tuple[str, str, str]] = {
    "accepted": ("#009E73", "D", "on the way to the answer"),
    "kept": ("#8FD3BC", "o", "gone on from"),
    "pruned": ("#D55E00", "X", "pruned"),
    "failed": ("#444444", "v", "raised an error"),
    "waiting": ("#BBBBBB", "s", "still waiting at the end"),
}
_MAX_LABELLED = 80
"""Limit of the states of a labelled tree; in larger ones the labels would overlap."""


@dataclasses.dataclass(frozen=True)
class LoggedState:
    """One state of a run.

    Attributes:
      path: path of firings that led to it; () is the first.
      parent: the path of the state that was fired; None for the first.
      fate: "accepted", on the path to the answer or the answer itself; "kept", it was continued;
        "pruned", it was not, or is an end that was not chosen; "failed", it raised an error;
        "waiting", a value from another agent was missing.
      waits_for: "llm", "tool", "ask", "next", "result", "yield", "choose", "several" or "await";
        "begin" before the first wait, "end" after the last.
      line: the line in which it waits.
      score: the score given by the supervisor's value function, or None.
      fired: number of firings.
      value: the value of a finished state, or the error, as text.
      began, ended: of the firing that led to it, in seconds since the runtime's start.
      restored: how the fired state was restored: "original", "copy" or "replay"; see `State`.
      end_error: the error that its code raised when it was ended, as text.
    """

    path: tuple[int, ...]
    parent: tuple[int, ...] | None
    fate: str
    waits_for: str
    line: int
    score: float | None
    fired: int
    value: str | None
    began: float
    ended: float
    restored: str = ""
    end_error: str | None = None


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """A run of an agent; see `AgentRun`.

    `parent` is the id of the run that spawned it, `error` the reason why it has no value.
    """

    id: str
    agent: str
    supervisor: str
    parent: str | None
    began: float
    ended: float
    calls: int
    new_tokens: int
    prompt_tokens: int
    value: str | None
    error: str | None
    states: tuple[LoggedState, ...]
    cost: float = 0.0


@dataclasses.dataclass(frozen=True)
class SearchLog:
    """The runs of a runtime, in the order of their starts."""

    runs: tuple[LoggedRun, ...]

    @classmethod
    def of(cls, runtime: Runtime) -> Self:
        """The log of a runtime so far; agents that are running are not disturbed."""
        return cls(tuple(_logged_run(run) for run in runtime.runs))

    def to_json(self) -> dict[str, Any]:
        """The log as plain data."""
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    def save(self, file: str | os.PathLike) -> None:
        """Writes JSON, the whole file or nothing.

        Raises:
          WriteError: it cannot be written; what was there before stays.
        """
        with whole_file(Path(file)) as whole:
            json.dump(checksums.sealed(self.to_json()), whole)

    @classmethod
    def load(cls, file: str | os.PathLike) -> Self:
        """Reads a file written by `save`.

        Raises:
          ValueError: it is not a search log.
          OSError: it cannot be read.
        """

        def path(value: list[int] | None) -> tuple[int, ...] | None:
            return None if value is None else tuple(value)

        try:
            data = checksums.loads(Path(file).read_text(encoding="utf-8"))
            if data["format"] != _FORMAT:
                raise ValueError(f"its format is {data['format']!r}, not {_FORMAT!r}")
            return cls(
                tuple(
                    LoggedRun(
                        **{
                            **run,
                            "states": tuple(
                                LoggedState(
                                    **{
                                        **state,
                                        "path": path(state["path"]),
                                        "parent": path(state["parent"]),
                                    }
                                )
                                for state in run["states"]
                            ),
                        }
                    )
                    for run in data["runs"]
                )
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{file} is no search log of agents ({first_line(error)}); give a file that SearchLog.save has "
                "written"
            ) from error


def _logged_run(run: AgentRun) -> LoggedRun:
    accepted, accepted_path = run.accepted, _with_ancestors(run.accepted)
    # A supervisor may have fired states that it made itself, which were never committed.
    states = {state.path: state for state in run.states}
    for state in run.states:
        for above in _with_ancestors(state.parent).values():
            states.setdefault(above.path, above)
    return LoggedRun(
        run.id,
        run.agent.name,
        type(run.supervisor).__name__,
        run.parent and run.parent.id,
        run.began,
        run.ended if run.done else run.runtime.clock(),
        run.calls,
        run.new_tokens,
        run.prompt_tokens,
        None if accepted is None else _short(accepted.value),
        None if run.error is None else _short(run.error),
        tuple(_logged_state(state, accepted_path) for state in states.values()),
        run.cost,
    )


def _with_ancestors(state: State | None) -> dict[tuple[int, ...], State]:
    """The state and all its ancestors, by their paths."""
    found: dict[tuple[int, ...], State] = {}
    while state:
        found[state.path] = state
        state = state.parent
    return found


def _logged_state(state: State, accepted_path: Mapping[tuple[int, ...], State]) -> LoggedState:
    if state.path in accepted_path:
        fate = "accepted"
    elif state.error is not None:
        fate = "failed"
    elif state.fired:
        fate = "kept"
    else:
        fate = "waiting" if state.sleeping else "pruned"
    value = state.error if state.error is not None else state.value if state.finished else None
    return LoggedState(
        state.path,
        state.parent.path if state.parent else None,
        fate,
        _waits_for(state),
        state.line,
        state.score,
        state.fired,
        None if value is None and not state.finished else _short(value),
        *state.times,
        state.restored,
        None if state.end_error is None else _short(state.end_error),
    )


def _waits_for(state: State) -> str:
    if state.ended:
        return "end"
    if state.waiting is None:
        return "begin"
    if isinstance(state.waiting, Choose):
        return "choose"
    if isinstance(state.waiting, Together):
        return "llm" if state.asks_model else "several"
    kinds = {Llm: "llm", Tool: "tool", CallRun: "tool", Ask: "ask"}
    kinds |= {ChildNext: "next", ChildResult: "result", Yielded: "yield"}
    return next((name for kind, name in kinds.items() if isinstance(state.waiting, kind)), "await")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


# Pictures.


def tree_picture(run: LoggedRun) -> "Figure":
    """The search tree of a run, from left to right, with the fates and scores of its states.

    Compare figure 2a of Hive.

    Raises:
      TypeError: something else than a run of a log.
      ImportError: matplotlib is not installed.
    """
    if not isinstance(run, LoggedRun):
        raise TypeError(
            f"a {type(run).__name__} is no run of a log; give one of SearchLog.of(runtime).runs"
        )
    positions = _positions(run)
    width, height = (max(position[axis] for position in positions.values()) for axis in (0, 1))
    figure = empty_figure(min(2.0 + 1.1 * (width + 1), 24.0), min(1.6 + 0.34 * (height + 1), 40.0))
    ax = figure.add_subplot()
    _draw_edges(ax, run, positions)
    for fate, (colour, marker, label) in _FATE_STYLES.items():
        if points := [positions[state.path] for state in run.states if state.fate == fate]:
            ax.scatter(
                *zip(*points, strict=True),
                c=colour,
                marker=marker,
                s=60,
                edgecolors="white",
                linewidths=0.6,
                label=label,
                zorder=2,
            )
    labelled = run.states if len(run.states) <= _MAX_LABELLED else ()
    for state in labelled:
        place = positions[state.path]
        ax.annotate(_state_label(state), place, (4, 6), textcoords="offset points", fontsize=7)
    labels = "\nat a state: what it waits for, in which line, and after a colon its score"
    ax.set_title(
        f"{run.agent} under {run.supervisor}: {len(run.states)} states, {run.calls} model calls{labels * bool(labelled)}",
        loc="left",
        fontsize=10.5,
    )
    ax.invert_yaxis()
    ax.margins(0.08)
    ax.axis("off")
    figure.legend(loc="outside lower center", ncols=len(_FATE_STYLES), frameon=False, fontsize=9)
    return figure


def _draw_edges(
    ax: "Axes", run: LoggedRun, positions: Mapping[tuple[int, ...], tuple[float, float]]
) -> None:
    """Draws the edges of a search tree; those on the path to the answer stand out."""
    from matplotlib.collections import LineCollection

    edges = [
        (state.fate == "accepted", (positions[state.parent], positions[state.path]))
        for state in run.states
        if state.parent is not None
    ]
    lines = LineCollection(
        [edge for _, edge in edges],
        colors=[_FATE_STYLES["accepted"][0] if accepted else "#CCCCCC" for accepted, _ in edges],
        linewidths=[2.0 if accepted else 0.8 for accepted, _ in edges],
        zorder=1,
    )
    ax.add_collection(lines)


def _state_label(state: LoggedState) -> str:
    """The wait of a state, with its line, and its score."""
    if not state.path:
        wait = "begin"
    elif state.waits_for == "end":
        wait = "end"
    else:
        wait = f"{state.waits_for}, line {state.line}"
    return wait if state.score is None else f"{wait}: {state.score:.3g}"


def _positions(run: LoggedRun) -> dict[tuple[int, ...], tuple[float, float]]:
    """(x, y) of each state: its depth, and the middle of its children.

    Leaves are one below the other, in the order of their firings.
    """
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {
        state.path: [] for state in run.states
    }
    for state in run.states:
        if state.parent is not None:
            children[state.parent].append(state.path)
    positions: dict[tuple[int, ...], tuple[float, float]] = {}
    stack, leaves = [(run.states[0].path, 0, False)], 0
    while stack:
        path, depth, done = stack.pop()
        below = sorted(children[path])
        if done:
            positions[path] = depth, (positions[below[0]][1] + positions[below[-1]][1]) / 2
        elif below:
            stack += [
                (path, depth, True),
                *((child, depth + 1, False) for child in reversed(below)),
            ]
        else:
            positions[path] = depth, float(leaves)
            leaves += 1
    return positions


_WAIT_COLOURS: Mapping[str, str] = {"llm": "#0072B2", "tool": "#E69F00", "other": "#999999"}
_MAX_BARS = 200
"""Limit of runs in a timeline, which shows the first ones."""


def timeline_picture(log: SearchLog) -> "Figure":
    """One bar for each run, from its start to its end, with the waits of its firings in it.

    A firing that took no time is a line.

    Raises:
      ImportError: matplotlib is not installed.
    """
    runs = log.runs[:_MAX_BARS]
    figure = empty_figure(9.0, 1.4 + 0.3 * len(runs))
    from matplotlib.patches import Patch

    ax = figure.add_subplot()
    for row, run in enumerate(runs):
        ax.barh(
            row,
            max(run.ended - run.began, 0.0),
            0.72,
            left=run.began,
            color="#EEEEEE",
            edgecolor="#BBBBBB",
            linewidth=0.5,
        )
        _draw_firings(ax, row, run)
    ax.set_yticks(range(len(runs)), [run.agent for run in runs], fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.invert_yaxis()
    ax.set(xlabel="seconds")
    shown = f", the first {len(runs)} of {len(log.runs)}" if len(runs) < len(log.runs) else ""
    ax.set_title(f"What agents waited for{shown}", loc="left", fontsize=10.5)
    labels = {"llm": "the model", "tool": "a tool", "other": "anything else"}
    figure.legend(
        handles=[Patch(color=_WAIT_COLOURS[name], label=label) for name, label in labels.items()],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw_firings(ax: "Axes", row: int, run: LoggedRun) -> None:
    """Draws the waits of a run's firings; simultaneous ones are one below the other."""
    waits = {state.path: state.waits_for for state in run.states}
    firings = sorted(
        (state.began, state.ended, waits[state.parent])
        for state in run.states
        if state.parent is not None
    )
    lanes: list[float] = []  # end of the last firing in each lane
    lane_of_firing = []
    for began, ended, _ in firings:
        lane = next((i for i, end in enumerate(lanes) if end <= began), len(lanes))
        lanes[lane : lane + 1] = [ended]
        lane_of_firing.append(lane)
    height = 0.64 / max(len(lanes), 1)
    colours = [_WAIT_COLOURS.get(kind, _WAIT_COLOURS["other"]) for _, _, kind in firings]
    ax.barh(
        [row - 0.32 + height * (lane + 0.5) for lane in lane_of_firing],
        [ended - began for began, ended, _ in firings],
        height * 0.9,
        left=[began for began, _, _ in firings],
        color=colours,
        edgecolor=colours,
        linewidth=0.5,
    )


def empty_figure(width: float, height: float) -> "Figure":
    """A figure of this size in inches; an ImportError where matplotlib is not installed."""
    return figure_class()(figsize=(width, height), dpi=90, layout="constrained")
