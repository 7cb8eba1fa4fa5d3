"""Section 8.2 of Hive for scripts.papers.hive: the speed-up of sampling again with the Logits Cache.

The measurement is that of scripts/bench/logits_cache.py, on any model: puzzles of the game of 24 are
answered once and then again with other seeds, with as many tokens every time, at several
temperatures, on an engine without the Logits Cache and on engines that use it stepwise and by
hotspots (figure 8); and then under supervisors that fire states again.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from jaxshare import progress
from jaxshare.models import LoadedModel
from jaxshare.serving.cli import agents_options
from jaxshare.serving.inputs import cache_dtype
from scripts.bench.lib import Parser
from scripts.bench.parts.logits_cache.options import (
    CACHE_BYTES,
    SUPERVISORS,
    TEMPERATURES,
    Scale,
    temperatures_of,
)
from scripts.bench.parts.logits_cache.puzzles import prompts_of, read_puzzles
from scripts.bench.parts.logits_cache.replays import Replays
from scripts.bench.parts.logits_cache.report import averages, model_text
from scripts.bench.parts.logits_cache.supervised import search_point
from scripts.papers import hive_pictures
from scripts.papers.folder import PaperFolder, this_machine
from scripts.papers.hive_experiment import (
    HiveExperiment,
    HivePlan,
    add_data,
    common_settings,
    puzzles_of,
    refuse_scripted,
)

QUICK = Scale(puzzles=4, rows=1, kept=64, searched=2)
FULL = Scale(puzzles=100, rows=1, kept=64, searched=20)
TOKENS, QUICK_TOKENS = 500, 40
QUICK_TEMPERATURES, QUICK_SUPERVISORS = "0.2,1.0", "ToT"
ABOUT = {"part": "about"}
"""The key of what is known of the model and the prompts."""


def add_arguments(parser: Parser) -> None:
    """Adds the options of this experiment."""
    add_data(parser)
    parser.add_argument(
        "--puzzles",
        type=int,
        metavar="N",
        help=f"of the sample (default {FULL.puzzles}; quick {QUICK.puzzles})",
    )
    parser.add_argument(
        "--temperatures",
        metavar="T,T",
        help=f"(default {TEMPERATURES}; quick {QUICK_TEMPERATURES})",
    )
    parser.add_argument(
        "--tokens", type=int, help=f"of every answer (default {TOKENS}; quick {QUICK_TOKENS})"
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=2,
        help="answers of each prompt after the first (default %(default)s)",
    )
    parser.add_argument(
        "--kept",
        type=int,
        metavar="K",
        help=f"logits that are kept of a distribution (default {FULL.kept})",
    )
    parser.add_argument(
        "--supervisors",
        metavar="S,S",
        help=f"of {','.join(SUPERVISORS)}, or none (default all; quick {QUICK_SUPERVISORS})",
    )
    parser.add_argument(
        "--searches",
        type=int,
        metavar="N",
        help=f"puzzles under each supervisor (default {FULL.searched}; quick {QUICK.searched})",
    )


def scale_of(parser: Parser, options: argparse.Namespace) -> Scale:
    """The sizes that are asked for; --max-concurrency prompts are answered side by side."""
    given = {
        "puzzles": options.puzzles,
        "rows": options.max_concurrency,
        "kept": options.kept,
        "searched": options.searches,
    }
    changed = {name: count for name, count in given.items() if count is not None}
    parser.at_least(1, **{{"searched": "searches"}.get(n, n): c for n, c in changed.items()})
    return dataclasses.replace(QUICK if options.quick else FULL, **changed)


def plan(parser: Parser, options: argparse.Namespace) -> HivePlan:
    """The temperatures and supervisors that are asked for; see `HiveExperiment`."""
    quick = options.quick
    refuse_scripted(options, "the Logits Cache is a part of an engine")
    if options.resample is not None:
        raise ValueError(
            f"--resample is {options.resample}, but both ways are compared here; leave it out"
        )
    engine = agents_options.check_engine(options)
    cache_bytes = engine.pop("logits_cache", CACHE_BYTES)
    scale = scale_of(parser, options)
    default = QUICK_TEMPERATURES if quick else TEMPERATURES
    temperatures = temperatures_of(parser, options.temperatures or default)
    tokens = options.tokens if options.tokens is not None else QUICK_TOKENS if quick else TOKENS
    parser.at_least(1, tokens=tokens, turns=options.turns)
    supervisors: tuple[str, ...] = ()
    if options.supervisors != "none":
        default = QUICK_SUPERVISORS if quick else ",".join(SUPERVISORS)
        supervisors = parser.some_of("--supervisors", options.supervisors or default, SUPERVISORS)
    puzzles = read_puzzles(puzzles_of(parser, options), scale.puzzles, options.seed)
    settings = {
        **common_settings(options, engine),
        "logits_cache": cache_bytes,
        "scale": dataclasses.asdict(scale),
        "tokens": tokens,
        "turns": options.turns,
        "temperatures": list(temperatures),
        "supervisors": list(supervisors),
        "puzzles": puzzles,
        "machine": this_machine(),
    }
    keys: list[dict[str, Any]] = [
        ABOUT,
        *({"part": "alone", "temperature": each} for each in temperatures),
        *({"part": name, "temperature": each} for name in supervisors for each in temperatures),
    ]

    def run(model: LoadedModel, folder: PaperFolder) -> None:
        prompts = prompts_of(model, puzzles, None, options.seed)
        replays = Replays(
            model,
            prompts,
            scale,
            tokens=tokens,
            turns=options.turns,
            seed=options.seed,
            engine=engine,
            logits_cache=cache_bytes,
        )
        left = [key for key in keys if key not in folder]
        if any(key["part"] == "alone" for key in left):
            with progress.work("compiling"):
                replays.compile()
        for key in left:
            with progress.work(" ".join(map(str, key.values()))) as work:
                folder.add(key, _point(key, replays, work))

    return HivePlan(settings, keys, run)


def _point(key: Mapping[str, Any], replays: Replays, work: Any) -> dict[str, Any]:
    """Measures one point."""
    model, scale = replays.model, replays.scale
    if key == ABOUT:
        return {
            "dtype": str(cache_dtype(model)),
            "vocab": model.config.vocab_size,
            "prompt_tokens": statistics.fmean(map(len, replays.prompts)),
            "profile": dataclasses.asdict(replays.profile()),
        }
    if key["part"] == "alone":
        return replays.point(key["temperature"], lambda step: setattr(work, "note", step))
    return search_point(
        model,
        replays.prompts[: scale.searched],
        supervisor=key["part"],
        temperature=key["temperature"],
        tokens=replays.tokens,
        kept=scale.kept,
        seed=replays.seed,
        engine=replays.engine,
        logits_cache=replays.logits_cache,
    )


def results(folder: PaperFolder) -> dict[str, Any]:
    """The points by temperature and supervisor, and the averages of the paper's last paragraph."""
    settings, points, searches = folder.settings, [], []
    for key, value in folder.points():
        if key["part"] == "alone":
            points.append(value)
        elif key != ABOUT:
            searches.append(value)
    points.sort(key=lambda point: point["temperature"])
    return {
        **settings["scale"],
        **(folder.value(ABOUT) if ABOUT in folder else {}),
        "model": settings["model"],
        "tokens": settings["tokens"],
        "turns": settings["turns"],
        "points": points,
        "averages": averages(points),
        "searches": searches,
    }


def as_text(found: Mapping[str, Any]) -> str:
    """The tables of the benchmark of the Logits Cache."""
    if not found["points"]:
        return "No temperature is measured yet."
    head = f"{found['tokens']} tokens an answer, {found['turns']} answers of each prompt after the first"
    return f"{head}\n\n{model_text(found)}"


def pictures(found: Mapping[str, Any]) -> dict[str, Any]:
    """Figure 8, and the speed-ups under supervisors."""
    made: dict[str, Any] = {}
    if found["points"]:
        made["figure8.png"] = lambda: hive_pictures.replay_picture(found["points"])
    if found["searches"]:
        made["supervisors.png"] = lambda: hive_pictures.supervisor_picture(found["searches"])
    return made


EXPERIMENT = HiveExperiment(
    "section 8.2: the Logits Cache's speed-up over temperatures, alone and under supervisors",
    add_arguments,
    plan,
    results,
    as_text,
    pictures,
)
