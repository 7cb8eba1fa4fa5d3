"""Section 8.3 and figure 9 of Hive for scripts.papers.hive: what stays in memory, by contribution.

The workload is that of scripts/bench/parts/residency/concurrent.py on any model: repairs side by
side, each a fixed workflow of the paper's five agents, with less memory than they need. Section 8.3
compares the policies (table 1: lru is the paper's baseline, contribution is Hive); figure 9 has the
contributions of the agents over time.
"""

import argparse
import asyncio
import collections
import dataclasses
import functools
import random
import statistics
import string
from collections.abc import Mapping, Sequence
from typing import Any

from jaxshare import progress
from jaxshare.arena import LARGE_TILE
from jaxshare.models import LoadedModel
from jaxshare.serving.agents import Runtime
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.profile_pictures import contribution_picture
from jaxshare.serving.cli import agents_options
from jaxshare.serving.inputs import encode, token_bytes
from jaxshare.serving.kvcache.eviction import POLICIES, make_policy
from jaxshare.serving.kvcache.pool import whole_tiles
from scripts.bench.lib import Parser, table
from scripts.bench.parts.residency import concurrent
from scripts.bench.parts.residency.concurrent import Measured
from scripts.bench.parts.residency.repairs import ANSWER, repairs
from scripts.bench.parts.residency.tree import Counts
from scripts.papers import hive_pictures
from scripts.papers.folder import PaperFolder, this_machine
from scripts.papers.hive_experiment import (
    HiveExperiment,
    HivePlan,
    common_settings,
    refuse_scripted,
)

ROUNDS, QUICK_ROUNDS = "7,21", "2"
REPEATS, QUICK_REPEATS = 5, 1
QUICK_ROOM = 2560
"""Tokens for each repair of few rounds, whose records are short."""
AROUND = 96
"""Tokens that a chat template may put around two messages."""
BASELINE, HIVE, AMPLE = "lru", "contribution", "ample"
NAMES = {BASELINE: "Baseline", HIVE: "HIVE"}
"""The names in table 1."""
PAPER = {
    (7, BASELINE): (0.903, 0.311, 26557),
    (7, HIVE): (0.935, 0.310, 18549),
    (21, BASELINE): (0.935, 0.414, 81147),
    (21, HIVE): (0.967, 0.311, 65598),
}
"""Table 1: hit rates of hotspots and of others, and evicted tokens, with Qwen3-8B."""


def add_section_arguments(parser: Parser) -> None:
    """Adds the options of section 8.3."""
    add_figure_arguments(parser)
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help=f"workflows with other texts (default {REPEATS}; quick {QUICK_REPEATS})",
    )


def add_figure_arguments(parser: Parser) -> None:
    """Adds the options of figure 9."""
    parser.add_argument(
        "--rounds",
        metavar="N,N",
        help=f"of the workflow (default {ROUNDS}; quick {QUICK_ROUNDS})",
    )
    parser.add_argument(
        "--tasks",
        type=int,
        metavar="N",
        help=f"repairs side by side (default {concurrent.TASKS}; quick {concurrent.QUICK_TASKS})",
    )


def _settings(
    parser: Parser, options: argparse.Namespace
) -> tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]:
    """The settings of both experiments, the rounds, and the arguments of the engine."""
    refuse_scripted(options, "what stays in memory is an engine's to decide")
    engine = agents_options.check_engine(options)
    rounds = parser.numbers(
        "--rounds", options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS), "7,21"
    )
    tasks = options.tasks
    if tasks is None:
        tasks = concurrent.QUICK_TASKS if options.quick else concurrent.TASKS
    parser.at_least(1, tasks=tasks)
    settings = {
        **common_settings(options, engine),
        "rounds": list(rounds),
        "tasks": tasks,
        "machine": this_machine(),
    }
    return settings, rounds, engine


@dataclasses.dataclass(frozen=True)
class Repairs:
    """Runs the workflow, with what is alike in all runs.

    Attributes:
      model: answers.
      settings: of the experiment.
      engine: arguments of the engine, from the command line.
    """

    model: LoadedModel
    settings: Mapping[str, Any]
    engine: Mapping[str, Any]

    def capacity(self, rounds: int) -> int:
        """Tokens on the accelerator: those of --kv-bytes, or else the benchmark's for each repair,
        which are letters to the embedded model, and at least the longest prompt.

        Raises:
          ValueError: the longest prompt does not fit into --kv-bytes.
        """
        longest = self.longest(rounds)
        if "kv_bytes" in self.engine:
            found = self.engine["kv_bytes"] // token_bytes(self.model)
            if whole_tiles(found) < longest:
                raise ValueError(
                    f"--kv-bytes has room for {whole_tiles(found)} tokens, but the longest prompt of "
                    f"{rounds} rounds takes about {longest}; give at least "
                    f"{(longest + LARGE_TILE) * token_bytes(self.model)} bytes"
                )
            return found
        room = QUICK_ROOM if self.settings["quick"] else concurrent.ROOM
        tokens = self.settings["tasks"] * room * tokens_of_letters(self.model)
        return max(round(tokens), longest + LARGE_TILE)

    def longest(self, rounds: int) -> int:
        """Tokens of the longest prompt and its answer, about: those of its letters, and some for
        what is around messages."""
        scripted = ScriptedModel({lambda call: True: "x" * ANSWER})
        asyncio.run(Runtime(scripted).run(repairs, 1, rounds, self.settings["seed"]))
        letters = max(
            sum(len(message.content) for message in call.messages) for call in scripted.calls
        )
        return round(letters * tokens_of_letters(self.model)) + ANSWER + AROUND

    def ample(self, rounds: int) -> int:
        """Tokens that all prompts of so many rounds fit into, in proportion to the benchmark's."""
        part = max(rounds, 7) * self.settings["tasks"] / (21 * concurrent.TASKS)
        return round(concurrent.AMPLE * part * tokens_of_letters(self.model))

    def run(self, name: str, rounds: int, repeat: int) -> Measured:
        """Runs the workflow once by a policy; `ample` is lru with memory for all."""
        given = {
            key: value
            for key, value in self.engine.items()
            if key not in ("policy", "kv_bytes", "host_kv_bytes")
        }
        is_ample = name == AMPLE
        host = self.engine.get("host_kv_bytes", 0) // token_bytes(self.model)
        policy = concurrent.POLICIES.get(
            BASELINE if is_ample else name, functools.partial(make_policy, name)
        )
        with progress.work(f"{rounds} rounds by {name}"):
            return concurrent.run(
                self.model,
                policy(),
                tasks=self.settings["tasks"],
                rounds=rounds,
                seed=self.settings["seed"] + repeat,
                capacity=self.ample(rounds) if is_ample else self.capacity(rounds),
                host=0 if is_ample else host,
                most_calls=self.settings["max_concurrency"],
                resample=self.settings["resample"],
                **given,
            )


def tokens_of_letters(model: LoadedModel) -> float:
    """The tokens of a letter in the workflow's texts, which are random letters."""
    rng = random.Random(0)
    text = "".join(rng.choice(string.ascii_lowercase) for _ in range(2000))
    return len(encode(model, text)) / len(text)


def plan_section(parser: Parser, options: argparse.Namespace) -> HivePlan:
    """The runs that are asked for; see `HiveExperiment`."""
    settings, rounds, engine = _settings(parser, options)
    repeats = options.repeats
    if repeats is None:
        repeats = QUICK_REPEATS if options.quick else REPEATS
    parser.at_least(1, repeats=repeats)
    others = [*concurrent.POLICIES]
    if options.policy or options.quick:
        others = [*dict.fromkeys((options.policy or HIVE, BASELINE))]
    names = [AMPLE, *others]
    settings |= {"repeats": repeats, "policies": names}
    keys = []
    for number in rounds:
        for repeat in range(repeats):  # each begins with another policy
            first = repeat % len(names)
            keys += [
                {"rounds": number, "repeat": repeat, "policy": name}
                for name in names[first:] + names[:first]
            ]

    def run(model: LoadedModel, folder: PaperFolder) -> None:
        runner = Repairs(model, settings, engine)
        left = [key for key in keys if key not in folder]
        for number in rounds:
            runner.capacity(number)  # which refuses what cannot be run
        if left:  # compiles; in no policy's time
            runner.run(HIVE, min(2, *rounds), 0)
        for key in left:
            measured = runner.run(key["policy"], key["rounds"], key["repeat"])
            value = dataclasses.asdict(dataclasses.replace(measured, contributions=[]))
            folder.add(key, {**value, "capacity": runner.capacity(key["rounds"])})

    return HivePlan(settings, keys, run)


def section_results(folder: PaperFolder) -> dict[str, Any]:
    """Table 1 with every policy, of the repeats that all policies have run."""
    found: dict[int, dict[int, dict[str, Measured]]] = collections.defaultdict(
        lambda: collections.defaultdict(dict)
    )
    capacities = {}
    for key, value in folder.points():
        capacities[key["rounds"]] = value["capacity"]
        found[key["rounds"]][key["repeat"]][key["policy"]] = _measured(value)
    names, settings, tables = folder.settings["policies"], folder.settings, []
    for rounds, repeats in sorted(found.items()):
        whole = [each for _, each in sorted(repeats.items()) if len(each) == len(names)]
        if not whole:
            continue
        runs = {name: [each[name] for each in whole] for name in names}
        tables.append(
            {
                "rounds": rounds,
                "tasks": settings["tasks"],
                "repeats": len(whole),
                "capacity": capacities[rounds],
                "host": settings.get("host_kv_bytes") or 0,
                "different_ends": sum(
                    each[name].said != each[BASELINE].said for each in whole for name in names
                ),
                "policies": concurrent.summarise(runs),
                "paper": {
                    NAMES[name]: PAPER[rounds, name] for name in NAMES if (rounds, name) in PAPER
                },
            }
        )
    return {"tables": tables}


def _measured(value: Mapping[str, Any]) -> Measured:
    fields = {name: each for name, each in value.items() if name != "capacity"}
    fields["counts"] = Counts(**fields["counts"])
    fields["calls"] = [tuple(call) for call in fields["calls"]]
    return Measured(**fields)


def section_text(found: Mapping[str, Any]) -> str:
    """Table 1 beside the paper's, and all measurements of the benchmark."""
    if not found["tables"]:
        return "No repeat is measured with every policy yet."
    header = ("rounds", "method", "hotspot hit rate", "non-hotspot", "evicted tokens", "of")
    rows = []
    for each in found["tables"]:
        policies = {row["policy"]: row for row in each["policies"]}
        for policy, name in NAMES.items():
            if row := policies.get(policy):
                numbers = row["hot_hit_rate"], row["cold_hit_rate"], row["evicted_tokens"]
                rows.append(_table_row(each["rounds"], name, numbers, "here"))
            if name in each["paper"]:
                rows.append(_table_row(each["rounds"], name, each["paper"][name], "the paper"))
    ends = sum(each["different_ends"] for each in found["tables"])
    note = (
        f"\n\n{ends} runs have come to another end than lru: in a narrow dtype texts depend on what "
        "else runs; --dtype float32 has them alike"
    ) * bool(ends)
    return "\n".join([table(header, rows), *concurrent.lines(found["tables"])]) + note


def _table_row(rounds: int, name: str, numbers: Sequence[float], source: str) -> tuple[str, ...]:
    hot, cold, evicted = numbers
    return str(rounds), name, f"{hot:.3f}", f"{cold:.3f}", f"{evicted:.0f}", source


def section_pictures(found: Mapping[str, Any]) -> dict[str, Any]:
    """Hit rates and evicted tokens by policy."""
    if not found["tables"]:
        return {}
    return {"table1.png": lambda: hive_pictures.residency_picture(found["tables"])}


# Figure 9.


def plan_figure(parser: Parser, options: argparse.Namespace) -> HivePlan:
    """A run by contribution for each number of rounds; see `HiveExperiment`."""
    settings, rounds, engine = _settings(parser, options)
    if options.policy not in (None, HIVE):
        raise ValueError(
            f"--policy is {options.policy}, but only {HIVE}, of {', '.join(POLICIES)}, knows "
            "contributions; leave it out"
        )
    keys = [{"rounds": number} for number in rounds]

    def run(model: LoadedModel, folder: PaperFolder) -> None:
        runner = Repairs(model, settings, engine)
        for number in rounds:
            runner.capacity(number)  # which refuses what cannot be run
        runner.run(HIVE, 1, 0)  # compiles, so that the seconds are those of the agents
        for key in keys:
            if key not in folder:
                measured = runner.run(HIVE, key["rounds"], 0)
                value = {
                    "contributions": [[at, shares] for at, shares in measured.contributions],
                    "calls": collections.Counter(name for name, *_ in measured.calls),
                    "seconds": measured.seconds,
                    "capacity": runner.capacity(key["rounds"]),
                }
                folder.add(key, value)

    return HivePlan(settings, keys, run)


def figure_results(folder: PaperFolder) -> dict[str, Any]:
    """For each number of rounds the contributions over time, and each agent's mean share of them
    beside its share of the calls."""
    found = []
    for key, value in folder.points():
        shares = [shares for _, shares in value["contributions"]]
        calls = value["calls"]
        agents = [
            {
                "agent": name,
                "calls": calls[name] / sum(calls.values()),
                "mean": statistics.fmean(each.get(name, 0.0) for each in shares),
                "last": shares[-1].get(name, 0.0),
            }
            for name in sorted(calls, key=lambda name: (-calls[name], name))
        ]
        found.append({**key, "agents": agents, "contributions": value["contributions"]})
    return {"runs": found}


def figure_text(found: Mapping[str, Any]) -> str:
    """Mean and last contributions beside the shares of calls."""
    header = ("rounds", "agent", "of all calls", "contribution", "at the end")
    rows = [
        (
            str(run["rounds"]),
            each["agent"],
            *(f"{each[name]:.3f}" for name in ("calls", "mean", "last")),
        )
        for run in found["runs"]
        for each in run["agents"]
    ]
    return table(header, rows) if rows else "No run is measured yet."


def figure_pictures(found: Mapping[str, Any]) -> dict[str, Any]:
    """Figure 9, for each number of rounds."""
    return {
        f"figure9-{run['rounds']}.png": functools.partial(
            contribution_picture, run["contributions"]
        )
        for run in found["runs"]
    }


SECTION = HiveExperiment(
    "section 8.3: what concurrent agents find in memory, by policy (table 1)",
    add_section_arguments,
    plan_section,
    section_results,
    section_text,
    section_pictures,
)
FIGURE = HiveExperiment(
    "figure 9: the contributions of agents over time",
    add_figure_arguments,
    plan_figure,
    figure_results,
    figure_text,
    figure_pictures,
)
