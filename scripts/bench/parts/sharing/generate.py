"""Runs of `generate`, for scripts.bench.sharing: questions about one long document (Hydragen
section 4.3), and two levels of sharing (4.4)."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxshare import Sampler
from jaxshare.arena import ALIGNMENT
from jaxshare.models import LoadedModel
from jaxshare.serving import Branches, Completions, Prefixes, generate
from scripts.bench.lib import alternate, ratios
from scripts.bench.parts.sharing.attention import NO_ATTENTION, SHARED, UNSHARED, Say, copies_bytes
from scripts.bench.parts.sharing.decode import AttentionFreeModel
from scripts.bench.parts.sharing.needles import Needles, accuracy

ANSWER_TOKENS = 8
# Sides of the two levels, as they are called in results.
ONE, TWO, MORE = "one level", "two levels", "two levels, more rows"


class Questions:
    """Questions about a document that is prefilled once, greedily answered by one `generate`."""

    def __init__(self, model: LoadedModel, needles: Needles, most: int, rows: int):
        """`most` questions at most, `rows` of them at a time."""
        self.model, self.needles, self.rows = model, needles, rows
        longest = max(count_tokens(model, fact.question) for fact in needles.facts)
        self.tokens = count_tokens(model, needles.prefix)
        store = Prefixes(
            model,
            max_tokens=room(self.tokens) + min(most, rows) * room(2 * longest + ANSWER_TOKENS),
        )
        begin = time.perf_counter()
        self.prefix = store.add(needles.prefix)
        self.prefix.logits.block_until_ready()
        self.prefill_seconds = time.perf_counter() - begin

    def ask(self, count: int) -> Completions:
        """Answers `count` questions; `answers` keeps the last completions."""
        done = generate(
            self.model,
            [fact.question for fact in self.needles.questions(count)],
            prefix=self.prefix,
            max_new_tokens=ANSWER_TOKENS,
            sampler=Sampler(),
            max_rows=self.rows,
            warm_up=True,
        )
        self.answers = done.completions
        return done


def count_tokens(model: LoadedModel, text: str) -> int:
    return len(model.tokenizer.encode(text, verbose=False))  # pyright: ignore[reportOptionalMemberAccess]


def room(tokens: int) -> int:
    """The tokens of a store that a block of `tokens` takes: whole tiles."""
    return tokens + -tokens % ALIGNMENT


def measure_needles(
    model: LoadedModel,
    needles: Needles,
    counts: Sequence[int],
    rows: int,
    rounds: int,
    most_bytes: int,
    other_sides: bool,
    say: Say,
) -> dict[str, Any]:
    """Seconds by the number of questions, and how many answers were right.

    The document is prefilled before the clock starts, except where it is not shared: then every
    question brings it.

    Args:
      rows: questions at a time, at most.
      counts: numbers of questions, ascending.
      other_sides: measure without attention too, and the smallest count unshared, once, if its
        copies take at most `most_bytes`.
    """
    say("needles: the document")
    runs = {
        name: Questions(side, needles, max(counts), rows)
        for name, side in ((SHARED, model), (NO_ATTENTION, AttentionFreeModel.of(model)))
        if other_sides or name == SHARED
    }
    right, by_count = {}, {}
    for count in counts:
        say(f"needles: {count} questions")
        by_count[count] = _alternated(
            {
                name: lambda run=run, count=count: run.ask(count).seconds
                for name, run in runs.items()
            },
            rounds,
        )
        right[str(count)] = accuracy(
            needles.questions(count), [c.text for c in runs[SHARED].answers]
        )
    unshared, fewest = None, min(counts)
    copies = copies_bytes(model.config, fewest, runs[SHARED].tokens + ANSWER_TOKENS)
    if other_sides and copies <= most_bytes:
        say(f"needles: {fewest} questions, unshared")
        unshared = _unshared_seconds(model, needles, fewest)
    return {
        "document_tokens": runs[SHARED].tokens,
        "prefill_seconds": runs[SHARED].prefill_seconds,
        "accuracy": right,
        **summarise_needles(by_count, unshared),
    }


def _unshared_seconds(model: LoadedModel, needles: Needles, count: int) -> float:
    """Seconds of `count` questions, each of which brings the document."""
    return generate(
        model,
        [needles.prefix + fact.question for fact in needles.questions(count)],
        share=False,
        max_new_tokens=ANSWER_TOKENS,
        sampler=Sampler(),
        warm_up=True,
    ).seconds


def measure_documents(
    model: LoadedModel, documents: Mapping[int, Needles], count: int, rounds: int, say: Say
) -> dict[str, Any]:
    """Seconds of `count` questions about documents of different lengths, and how the longest
    compares with the shortest."""
    say(f"needles: {count} questions, documents of {' and '.join(map(str, documents))} tokens")
    runs = {
        length: Questions(model, needles, count, count) for length, needles in documents.items()
    }
    times = _alternated(
        {length: lambda run=run: run.ask(count).seconds for length, run in runs.items()}, rounds
    )
    return {
        "questions": count,
        "seconds": {str(length): statistics.median(seconds) for length, seconds in times.items()},
        "longest_to_shortest": ratios(times[max(times)], times[min(times)]),
    }


def _alternated[T](sides: Mapping[T, Callable[[], float]], rounds: int) -> dict[T, list[float]]:
    """Runs `alternate`, after one turn of each side that compiles what is left to compile."""
    alternate(sides, 1)
    return alternate(sides, rounds)


def summarise_needles(
    by_count: dict[int, dict[str, list[float]]], unshared: float | None
) -> dict[str, Any]:
    """Medians, how that of the most questions compares with that of the fewest, and the line
    through them.

    Args:
      by_count: seconds in every round, by number of questions and side.
      unshared: seconds of the fewest questions where each brings the document, or None.
    """
    counts = sorted(by_count)
    medians = {
        name: {count: statistics.median(by_count[count][name]) for count in counts}
        for name in by_count[counts[0]]
    }
    first, last = counts[0], counts[-1]
    found: dict[str, Any] = {
        "questions": counts,
        "seconds": {name: {str(n): t for n, t in m.items()} for name, m in medians.items()},
        "last_to_first": medians[SHARED][last] / medians[SHARED][first],
        "line": {},
    }
    if len(counts) > 1:
        for name, m in medians.items():
            slope, start = np.polyfit(counts, [m[n] for n in counts], 1)
            found["line"][name] = {
                "seconds_at_none": float(start),
                "seconds_a_question": float(slope),
            }
    if unshared is not None:
        found["seconds"][UNSHARED] = {str(first): unshared}
        found["unshared_to_shared"] = unshared / medians[SHARED][first]
    return found


def measure_levels(
    model: LoadedModel,
    few_shot: int,
    problem: int,
    problems: int,
    samples: int,
    new_tokens: int,
    batch: int,
    equal_batch: bool,
    rounds: int,
    seed: int,
    say: Say,
) -> dict[str, Any]:
    """Completions of problems after one few-shot prompt, all random: with the prompt alone kept
    once, or each problem too.

    Args:
      few_shot, problem, new_tokens: lengths, in tokens.
      problems, samples: how many problems, and completions of each.
      batch: completions at a time with one level, which fill the store.
      equal_batch: measure two levels with as many rows too, not only with all that fit the store.
    """
    rng, vocabulary = np.random.default_rng([seed, 2]), model.config.vocab_size
    store = Prefixes(model, max_tokens=room(few_shot) + batch * room(problem + new_tokens))
    say("levels: few-shot prompt")
    prefix = store.add(rng.integers(0, vocabulary, few_shot).tolist())
    prompts = [rng.integers(0, vocabulary, problem).tolist() for _ in range(problems)]
    runs: dict[str, Branches] = {}

    def run(name: str, share: bool, rows: int) -> float:
        runs[name] = Branches(
            model,
            prompts,
            n=samples,
            max_new_tokens=new_tokens,
            sampler=Sampler(temperature=1.0),
            seed=seed,
            share=share,
            prefix=prefix,
            max_rows=rows,
        )
        done = sum(1 for _ in runs[name].stream(warm_up=True))
        if done != problems * samples:
            raise RuntimeError(f"{done} completions ended, but there are {problems * samples}")
        return runs[name].seconds

    two = {TWO: lambda: run(TWO, True, batch)} if equal_batch else {}
    more = {MORE: lambda: run(MORE, True, problems * samples)}
    say("levels: measure")
    times = _alternated({ONE: lambda: run(ONE, False, batch), **two, **more}, rounds)
    cost = {name: (run.rows, run.kv_bytes, run.passes) for name, run in runs.items()}
    return {
        "few_shot": few_shot,
        "problem": problem,
        "problems": problems,
        "samples": samples,
        "new_tokens": new_tokens,
        "store_tokens": store.kv.pool.tokens,
        **summarise_levels(times, cost),
    }


def summarise_levels(
    times: dict[str, list[float]], runs: dict[str, tuple[int, int, int]]
) -> dict[str, Any]:
    """Medians, and how many times slower than the other sides one level is. `runs`: rows at a time,
    bytes cached, passes."""
    return {
        "sides": {
            name: dict(
                zip(
                    ("seconds", "rows", "kv_bytes", "passes"),
                    (statistics.median(times[name]), *runs[name]),
                    strict=True,
                )
            )
            for name in times
        },
        "one_level_to": {name: ratios(times[ONE], times[name]) for name in times if name != ONE},
    }
