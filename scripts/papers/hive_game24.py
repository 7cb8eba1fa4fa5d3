"""The game of 24 for scripts.papers.hive: Tree of Thoughts beside single chains of thoughts.

The agents are those of examples/game24.py. One search keeps the best states of each level (Tree of
Thoughts, Yao et al., 2023, section 4.1, where 5 are kept and each is valued three times); the other
runs a chain of thoughts many times, of which the best counts. Solutions are worked out in fractions
whenever a report is made. The journal of a search has all that the model has said: an interrupted
search goes on with it, and asks for nothing again that it has.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxshare import progress
from jaxshare.models import LoadedModel
from jaxshare.serving import jsonl
from jaxshare.serving.agents import (
    Agent,
    AgentRun,
    BestOfN,
    ModelCall,
    Reply,
    Runtime,
    TreeOfThoughts,
)
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.agents.journal import Journal
from jaxshare.serving.agents.requests import Model
from jaxshare.serving.branches import pass_at_k
from jaxshare.serving.cli import agents_options
from jaxshare.serving.engine import Engine
from jaxshare.serving.evaluation.scoring import wilson
from scripts.bench.lib import Parser, table
from scripts.bench.parts.logits_cache.puzzles import example
from scripts.papers import folder as paper_folder
from scripts.papers import hive_pictures
from scripts.papers.folder import OTHER, PaperFolder
from scripts.papers.hive_experiment import (
    SCRIPTED,
    HiveExperiment,
    HivePlan,
    add_data,
    common_settings,
    puzzles_of,
)

RANKS = (901, 1000)
"""The puzzles of the paper of Tree of Thoughts, by their ranks from easy to hard."""
PUZZLES, QUICK_PUZZLES = 100, 5
BREADTH, KEPT, QUICK_KEPT, CHAINS, QUICK_CHAINS = 6, "1,5", "2", 100, 4
MOST_CALLS = 256
"""Calls of the model under way at once by default; an engine has 1,024 of them wait at most."""


def add_arguments(parser: Parser) -> None:
    """Adds the options of this experiment."""
    add_data(parser)
    parser.add_argument(
        "--ranks",
        metavar="A-B",
        help="of the file (default {}-{}, as in the paper of Tree of Thoughts; the last {} of a "
        "shorter file)".format(*RANKS, PUZZLES),
    )
    parser.add_argument(
        "--puzzles", type=int, metavar="N", help=f"the first N of them (quick {QUICK_PUZZLES})"
    )
    parser.add_argument(
        "--breadth",
        type=int,
        default=BREADTH,
        help="steps that are sampled from each state of a tree (default %(default)s)",
    )
    parser.add_argument(
        "--keep",
        metavar="B,B",
        help=f"states that trees keep of a level (default {KEPT}; quick {QUICK_KEPT})",
    )
    parser.add_argument(
        "--chains",
        type=int,
        metavar="K",
        help=f"chains of each puzzle; 0 for none (default {CHAINS}; quick {QUICK_CHAINS})",
    )
    parser.add_argument(
        "--chat",
        metavar="JSON",
        help='variables of the model\'s chat template, such as {"enable_thinking": false}: an answer '
        "has 32 tokens in one line, which leave no room for thinking",
    )


def chosen(
    file: Path, ranks: str | None, count: int | None
) -> tuple[tuple[int, int], list[list[int]]]:
    """The ranks that are meant, and the numbers of their puzzles.

    Args:
      file: of puzzles from easy to hard.
      ranks: "901-1000", or None for the default.
      count: the first of these, or None for all.

    Raises:
      ValueError: a line of the file is no puzzle, or it has no such ranks.
    """
    found = [*example().read(str(file))]
    if ranks is None:
        first, last = RANKS if len(found) >= RANKS[1] else (len(found) - PUZZLES + 1, len(found))
        first = max(first, 1)
    else:
        match = re.fullmatch(r"(\d+)-(\d+)", ranks)
        first, last = map(int, match.groups()) if match else (0, 0)
        if not 1 <= first <= last <= len(found):
            raise ValueError(
                f"--ranks is {ranks!r}, but it must be two ranks from 1 to the {len(found)} of "
                f"{file}, such as 1-{len(found)}"
            )
    if count is not None:
        last = min(last, first + count - 1)
    return (first, last), found[first - 1 : last]


def variables_of(text: str | None) -> dict[str, Any]:
    """The variables that --chat gives.

    Raises:
      ValueError: it is no object of JSON.
    """
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f'--chat is {text!r}; it must be JSON such as {{"enable_thinking": false}}'
        )
    return found


def plan(parser: Parser, options: argparse.Namespace) -> HivePlan:
    """The searches that are asked for; see `HiveExperiment`."""
    quick = options.quick
    chains = options.chains if options.chains is not None else QUICK_CHAINS if quick else CHAINS
    kept = parser.numbers("--keep", options.keep or (QUICK_KEPT if quick else KEPT), "1,5")
    parser.at_least(1, breadth=options.breadth)
    count = options.puzzles if options.puzzles is not None else QUICK_PUZZLES if quick else None
    parser.at_least(1, puzzles=1 if count is None else count, chains=chains or 1)
    engine, variables = agents_options.check_engine(options), variables_of(options.chat)
    answers = None
    if options.model == SCRIPTED:
        agents_options.refuse_engine(options, "the scripted model has none")
        answers = jsonl.sha256(Path(str(example().__file__)).read_bytes())
    ranks, puzzles = chosen(puzzles_of(parser, options), options.ranks, count)
    settings = {
        **common_settings(options, engine),
        "answers": answers,
        "chat": variables,
        "ranks": list(ranks),
        "puzzles": paper_folder.digest(puzzles),
        "breadth": options.breadth,
        "keep": list(kept),
        "chains": chains,
    }
    keys: list[dict[str, Any]] = [{"search": "tot", "keep": keep} for keep in kept]
    if chains:
        keys.append({"search": "chains"})

    def run(model: LoadedModel, folder: PaperFolder) -> None:
        for key in keys:
            if key not in folder:
                searcher = Searcher(options, engine, variables, model, folder.path)
                folder.add(key, searcher.search(key, puzzles, ranks[0], chains))

    return HivePlan(settings, keys, run)


class ChatVariables:
    """A model for agents whose chat template has the same variables in every call."""

    def __init__(self, model: Model, variables: Mapping[str, Any]):
        self._model, self._variables = model, dict(variables)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ChatVariables":
        return self

    async def answer(self, call: ModelCall) -> Reply:
        """Answers one call."""
        variables = {**self._variables, **call.chat_template_kwargs}
        return await self._model.answer(dataclasses.replace(call, chat_template_kwargs=variables))


@dataclasses.dataclass
class Searcher:
    """Runs searches, with all that they have in common.

    Attributes:
      options: of the command.
      engine: arguments of the engine, which is a new one for every search.
      variables: of the chat template.
      loaded: the model; of the scripted one no more than its identity.
      folder: for the journals.
    """

    options: argparse.Namespace
    engine: Mapping[str, Any]
    variables: Mapping[str, Any]
    loaded: LoadedModel
    folder: Path

    def search(
        self, key: Mapping[str, Any], puzzles: Sequence[Sequence[int]], first: int, chains: int
    ) -> dict[str, Any]:
        """Searches for solutions of all puzzles at once.

        Args:
          key: of the point.
          puzzles: their numbers.
          first: the rank of the first one.
          chains: of each puzzle, where it is not a tree that is searched.

        Returns:
          Costs and expressions of each puzzle, and costs of all; times are those of one process, so
          there are none where a search went on after an interruption.

        Raises:
          ValueError: no call was answered, such as by a model whose chat template takes no --chat.
        """
        solver, name = solver_of(key, self.options.breadth, chains)
        with contextlib.ExitStack() as stack:
            journal = stack.enter_context(Journal.open(self.folder / f"{name}.journal"))
            is_resumed = len(journal) > 0
            engine = None
            model: Model = example().scripted()
            if self.options.model != SCRIPTED:
                engine = stack.enter_context(Engine(self.loaded, **self.engine))
                model = EngineModel(engine, resample=agents_options.resample_of(self.options))
            if self.variables:
                model = ChatVariables(model, self.variables)
            runtime = Runtime(
                model,
                seed=self.options.seed,
                most_calls=self.options.max_concurrency or MOST_CALLS,
                journal=journal,
            )
            numbers = [list(puzzle) for puzzle in puzzles]
            with progress.work(f"searching by {name}"):
                asyncio.run(runtime.run(example().solve_all, numbers, solver))
            costs = _costs(runtime, engine)
        found = of_puzzles(runtime.runs, puzzles, first, is_chains=key["search"] == "chains")
        if not any(each["new_tokens"] for each in found):
            why = next((error for each in found for error in each["dead_ends"]), "no call was made")
            raise ValueError(f"the model has answered nothing ({why}); mend that, and {OTHER}")
        return {"puzzles": found, **(costs | {"seconds": None} if is_resumed else costs)}


def solver_of(key: Mapping[str, Any], breadth: int, chains: int) -> tuple[Agent, str]:
    """The agent of a search, and its name."""
    solve = example().solve
    if key["search"] == "chains":
        return solve.under(BestOfN(chains, _solved)), "chains"
    judge = example().judge
    tree = TreeOfThoughts(breadth, key["keep"], judge, prune=0.01, enough=100.0)
    return solve.under(tree), f"tot-{key['keep']}"


def _solved(state: Any) -> float:
    return 1.0  # an expression that is none ends its path by an error


def _costs(runtime: Runtime, engine: Engine | None) -> dict[str, Any]:
    """The costs of all searches together."""
    root = runtime.runs[0]
    metrics, cache = (engine.metrics, engine.logits_cache) if engine else (None, None)
    compiling = metrics.compile_seconds if metrics else 0.0
    return {
        "seconds": max(root.ended - root.began - compiling, 0.0),
        "compile_seconds": compiling,
        "passes": metrics.passes if metrics else 0,
        "reused_tokens": metrics.reused if metrics else 0,
        "replayed_tokens": cache.statistics.replayed + cache.statistics.followed if cache else 0,
    }


def of_puzzles(
    runs: Sequence[AgentRun], puzzles: Sequence[Sequence[int]], first: int, *, is_chains: bool
) -> list[dict[str, Any]]:
    """The outcome of every puzzle, with the costs of its search and of the judges in it."""
    roots = [run for run in runs if run.parent is runs[0]]
    costs = {run.id: [0, 0, 0] for run in roots}
    for run in runs[1:]:
        root = run
        while root.parent is not runs[0] and root.parent is not None:
            root = root.parent
        for at, count in enumerate((run.calls, run.new_tokens, run.prompt_tokens)):
            costs[root.id][at] += count
    found = []
    for rank, (run, puzzle) in enumerate(zip(roots, puzzles, strict=True), first):
        ended = [state for state in run.states if state.ended and not state.finished]
        wrong = collections.Counter(
            re.sub(r"[-\d/()*+ ]{2,}", " ... ", str(state.error)) for state in ended
        )
        each = {
            "rank": rank,
            "puzzle": list(puzzle),
            "expression": run.accepted.value if run.accepted else None,
            "states": len(run.states),
            **dict(zip(("calls", "new_tokens", "prompt_tokens"), costs[run.id], strict=True)),
            "dead_ends": dict(wrong.most_common(3)),
        }
        if is_chains:
            paths = {state.path[0]: state for state in run.states if state.ended}
            each["expressions"] = [
                paths[at].value if paths[at].finished else None for at in sorted(paths)
            ]
        found.append(each)
    return found


# The report.


def results(folder: PaperFolder) -> dict[str, Any]:
    """The share of solved puzzles of each search, by what a search of one puzzle costs."""
    rows = []
    for key, value in folder.points():
        puzzles = value["puzzles"]
        if key["search"] == "chains":
            rows += _rows_of_chains(value)
            continue
        solved = [_is_right(each["expression"], each["puzzle"]) for each in puzzles]
        rows.append(_row(f"ToT, keep {key['keep']}", [*map(float, solved)], puzzles, value))
    return {"rows": rows}


def _rows_of_chains(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The best of 1, 2, 4, ... chains, in the mean over all choices of so many."""
    puzzles, found = value["puzzles"], []
    count = len(puzzles[0]["expressions"])
    right = [
        sum(_is_right(text, each["puzzle"]) for text in each["expressions"]) for each in puzzles
    ]
    sizes = sorted({*(2**i for i in range(count.bit_length())), count})
    for k in sizes:
        row = _row(
            f"best of {k} chain{'s' * (k > 1)}",
            [pass_at_k(each, count, k) for each in right],
            puzzles,
            value if k == count else {},
            k / count,
        )
        found.append(row | {"chains": k})
    return found


def _row(
    name: str,
    solved: Sequence[float],
    puzzles: Sequence[Mapping[str, Any]],
    costs: Mapping[str, Any],
    part: float = 1.0,
) -> dict[str, Any]:
    share = statistics.fmean(solved)
    return {
        "search": name,
        "puzzles": len(puzzles),
        "solved": share,
        "interval": list(wilson(share, len(puzzles))),
        "calls": part * statistics.fmean(each["calls"] for each in puzzles),
        "new_tokens": part * statistics.fmean(each["new_tokens"] for each in puzzles),
        **{
            name: costs.get(name)
            for name in ("seconds", "passes", "reused_tokens", "replayed_tokens")
        },
    }


def _is_right(expression: str | None, puzzle: Sequence[int]) -> bool:
    return expression is not None and example().is_solution(expression, puzzle)


def as_text(found: Mapping[str, Any]) -> str:
    """The table of all searches."""
    header = ("search", "solved", "95% interval", "calls", "tokens", "seconds", "replayed")
    rows = [
        (
            row["search"],
            f"{row['solved']:.1%}",
            "{:.1%} to {:.1%}".format(*row["interval"]),
            f"{row['calls']:.1f}",
            f"{row['new_tokens']:.0f}",
            "" if row["seconds"] is None else f"{row['seconds']:.1f}",
            "" if row["replayed_tokens"] is None else str(row["replayed_tokens"]),
        )
        for row in found["rows"]
    ]
    count = found["rows"][0]["puzzles"] if found["rows"] else 0
    return f"{count} puzzles; calls and tokens a puzzle\n\n{table(header, rows)}"


def pictures(found: Mapping[str, Any]) -> dict[str, Any]:
    """The share of solved puzzles by the calls of the model."""
    if not found["rows"]:
        return {}
    return {"game24.png": lambda: hive_pictures.searches_picture(found["rows"])}


EXPERIMENT = HiveExperiment(
    "the game of 24 by Tree of Thoughts, beside chains of thoughts",
    add_arguments,
    plan,
    results,
    as_text,
    pictures,
)
