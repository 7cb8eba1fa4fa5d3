"""Traces: the search trees and the timeline of agents that have run, as JSON and as pictures.

    runtime = Runtime(model)
    asyncio.run(runtime.run(agent, ...))
    trace = Trace.of(runtime)
    trace.save("run.json")
    tree_picture(trace.runs[0]).savefig("tree.png")
    timeline_picture(trace).savefig("timeline.png")

A trace has no value of an agent in it but as text: it is to be looked at, and says what a
supervisor accepted and what it pruned.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxshare.paths import whole_file
from jaxshare.serving.agents.requests import ChildNext, ChildResult, Llm, Tool, Yielded
from jaxshare.serving.agents.runtime import AgentRun, Runtime
from jaxshare.serving.agents.states import State

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMAT = "jaxshare agents trace 1"
_LONGEST = 300
"""Characters of a value or an error that are kept."""

# Of Okabe and Ito's, told apart by colour-blind readers too; the shapes say it again.
_LOOKS: Mapping[str, tuple[str, str, str]] = {
    "accepted": ("#009E73", "D", "on the way to the answer"),
    "kept": ("#8FD3BC", "o", "gone on from"),
    "pruned": ("#D55E00", "X", "pruned"),
    "failed": ("#444444", "v", "raised an error"),
    "waiting": ("#BBBBBB", "s", "still waiting at the end"),
}
_LABELLED = 80
"""States of a tree; in larger ones scores and lines would run into each other."""


@dataclasses.dataclass(frozen=True)
class LoggedState:
    """A state.

    Attributes:
      path: of firings that led there; () is the first.
      parent: the path of the state that was fired; None for the first.
      fate: "accepted", on the way to the answer, which is the last such; "kept", it was gone on
        from; "pruned", it was not, or is an end that was not chosen; "failed", it raised an error;
        "waiting", another agent had not given what it waited for.
      waits_for: "llm", "tool", "next", "result", "yield" or "await"; "begin" before the first,
        "end" behind the last.
      line: in which it waits.
      score: by the supervisor's value function, if it was asked.
      fired: how often.
      value: of a finished state, or the error, as text.
      began, ended: seconds since the runtime's start: when the firing that it comes of began and
        ended.
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


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """A run of an agent; see `AgentRun`. `parent` is the id of the run that spawned it, `error` why
    it has no value."""

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


@dataclasses.dataclass(frozen=True)
class SearchLog:
    """All runs of a runtime, in the order in which they began."""

    runs: tuple[LoggedRun, ...]

    @classmethod
    def of(cls, runtime: Runtime) -> Self:
        """What there is to see so far; nothing that is under way is disturbed."""
        return cls(tuple(_traced(run) for run in runtime.runs))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    def save(self, file: str | os.PathLike) -> None:
        """Writes JSON, the whole file or nothing.

        Raises:
          OSError: it cannot be written.
        """
        with whole_file(Path(file)) as whole:
            json.dump(self.to_json(), whole)

    @classmethod
    def load(cls, file: str | os.PathLike) -> Self:
        """Reads what `save` has written.

        Raises:
          ValueError: it is not a trace.
          OSError: it cannot be read.
        """

        def path(value: list[int] | None) -> tuple[int, ...] | None:
            return None if value is None else tuple(value)

        try:
            data = json.loads(Path(file).read_text(encoding="utf-8"))
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
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is no trace of agents ({error}); give a file that Trace.save has written"
            ) from error


def _traced(run: AgentRun) -> LoggedRun:
    ahead, accepted = _way(run.accepted), run.accepted
    # A supervisor may have fired states of its own making, which were never committed.
    states = {state.path: state for state in run.states}
    for state in run.states:
        for above in _way(state.parent).values():
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
        tuple(_traced_state(state, ahead) for state in states.values()),
    )


def _way(state: State | None) -> dict[tuple[int, ...], State]:
    """The state, and all above it, by their paths."""
    found: dict[tuple[int, ...], State] = {}
    while state:
        found[state.path] = state
        state = state.parent
    return found


def _traced_state(state: State, ahead: Mapping[tuple[int, ...], State]) -> LoggedState:
    if state.path in ahead:
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
    )


def _waits_for(state: State) -> str:
    if state.ended:
        return "end"
    if state.waiting is None:
        return "begin"
    kinds = {Llm: "llm", Tool: "tool", ChildNext: "next", ChildResult: "result", Yielded: "yield"}
    return next((name for kind, name in kinds.items() if isinstance(state.waiting, kind)), "await")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


# Pictures.


def tree_picture(run: LoggedRun) -> "Figure":
    """The search tree of a run, from left to right: what was accepted, gone on from, and pruned
    (figure 2a of Hive), with scores.

    Raises:
      ImportError: matplotlib is not installed.
    """
    places = _places(run)
    deepest, widest = (max(place[axis] for place in places.values()) for axis in (0, 1))
    figure = _figure(min(2.0 + 1.1 * (deepest + 1), 24.0), min(1.6 + 0.34 * (widest + 1), 40.0))
    from matplotlib.collections import LineCollection

    ax = figure.add_subplot()
    edges = [
        (state.fate == "accepted", (places[state.parent], places[state.path]))
        for state in run.states
        if state.parent is not None
    ]
    ax.add_collection(
        LineCollection(
            [edge for _, edge in edges],
            colors=[_LOOKS["accepted"][0] if way else "#CCCCCC" for way, _ in edges],
            linewidths=[2.0 if way else 0.8 for way, _ in edges],
            zorder=1,
        )
    )
    for fate, (colour, marker, label) in _LOOKS.items():
        if found := [places[state.path] for state in run.states if state.fate == fate]:
            ax.scatter(
                *zip(*found, strict=True),
                c=colour,
                marker=marker,
                s=60,
                edgecolors="white",
                linewidths=0.6,
                label=label,
                zorder=2,
            )
    if len(run.states) <= _LABELLED:
        for state in run.states:
            words = (
                "begin"
                if not state.path
                else f"{state.waits_for} {state.line}"
                if state.waits_for != "end"
                else "end"
            )
            score = "" if state.score is None else f" {state.score:.3g}"
            ax.annotate(
                words + score, places[state.path], (4, 6), textcoords="offset points", fontsize=7
            )
    ax.set_title(
        f"{run.agent} under {run.supervisor}: {len(run.states)} states, {run.calls} model calls",
        loc="left",
        fontsize=10.5,
    )
    ax.invert_yaxis()
    ax.margins(0.08)
    ax.axis("off")
    figure.legend(loc="outside lower center", ncols=len(_LOOKS), frameon=False, fontsize=9)
    return figure


def _places(run: LoggedRun) -> dict[tuple[int, ...], tuple[float, float]]:
    """Where each state stands: depth, and the middle of its children; leaves one below the other,
    in the order of their firings."""
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {
        state.path: [] for state in run.states
    }
    for state in run.states:
        if state.parent is not None:
            children[state.parent].append(state.path)
    places: dict[tuple[int, ...], tuple[float, float]] = {}
    stack, leaves = [(run.states[0].path, 0, False)], 0
    while stack:
        path, depth, done = stack.pop()
        below = sorted(children[path])
        if done:
            places[path] = depth, (places[below[0]][1] + places[below[-1]][1]) / 2
        elif below:
            stack += [
                (path, depth, True),
                *((child, depth + 1, False) for child in reversed(below)),
            ]
        else:
            places[path] = depth, float(leaves)
            leaves += 1
    return places


_BUSY: Mapping[str, str] = {"llm": "#0072B2", "tool": "#E69F00", "other": "#999999"}
_BARS = 200
"""Runs in a timeline, at most: the first ones."""


def timeline_picture(trace: SearchLog) -> "Figure":
    """One bar for each run, from its begin to its end, and in it what its firings waited for; what
    was done at once is a line.

    Raises:
      ImportError: matplotlib is not installed.
    """
    runs = trace.runs[:_BARS]
    figure = _figure(9.0, 1.4 + 0.3 * len(runs))
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
    which = f", the first {len(runs)} of {len(trace.runs)}" if len(runs) < len(trace.runs) else ""
    ax.set_title(f"What agents waited for{which}", loc="left", fontsize=10.5)
    labels = {"llm": "the model", "tool": "a tool", "other": "anything else"}
    figure.legend(
        handles=[Patch(color=_BUSY[name], label=label) for name, label in labels.items()],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw_firings(ax: "Axes", row: int, run: LoggedRun) -> None:
    """What firings of a run waited for; those at the same time one below the other."""
    waited = {state.path: state.waits_for for state in run.states}
    firings = sorted(
        (state.began, state.ended, waited[state.parent])
        for state in run.states
        if state.parent is not None
    )
    lanes: list[float] = []  # where the last firing of each ends
    placed = []
    for began, ended, _ in firings:
        lane = next((i for i, end in enumerate(lanes) if end <= began), len(lanes))
        lanes[lane : lane + 1] = [ended]
        placed.append(lane)
    height = 0.64 / max(len(lanes), 1)
    colours = [_BUSY.get(kind, _BUSY["other"]) for _, _, kind in firings]
    ax.barh(
        [row - 0.32 + height * (lane + 0.5) for lane in placed],
        [ended - began for began, ended, _ in firings],
        height * 0.9,
        left=[began for began, _, _ in firings],
        color=colours,
        edgecolor=colours,
        linewidth=0.5,
    )


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure  # here, because only pictures need it
    except ImportError as error:
        raise ImportError(
            "pictures are drawn with matplotlib, which is not installed: pip install "
            "'jaxshare[plot]'"
        ) from error
    return Figure(figsize=(width, height), dpi=90, layout="constrained")
