"""The setup of a session of workers: its arguments are checked, and its state is made."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from jaxshare import DecodeState, FinishReason, KVCache, Layout, Sampler
from jaxshare.argument_checks import as_integer
from jaxshare.compile_time import Stopwatch
from jaxshare.decoding.array_rows import arrays_on_host
from jaxshare.decoding.automaton import TokenAutomaton
from jaxshare.decoding.row_transfer import on_host
from jaxshare.decoding.samplers import SamplerPlaces
from jaxshare.decoding.steps import Steps
from jaxshare.models import LoadedModel
from jaxshare.serving.engine.decisions import text_digest
from jaxshare.serving.engine.session_passes import MIN_PLACES, RowShape
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.inputs import (
    as_sampler,
    cache_dtype,
    check_model,
    check_sampler,
    chosen,
    default_sampler,
)
from jaxshare.serving.kvcache.lease import KVLease
from jaxshare.serving.words import check_length
from jaxshare.serving.workers.block_sizes import block_sizes, rounded_budget
from jaxshare.serving.workers.feeding import feed_texts
from jaxshare.serving.workers.growth import Growth
from jaxshare.serving.workers.layouts import MAX_WORKERS, MOVES, MakeLayout, layout_maker
from jaxshare.serving.workers.prompts.presets import advises_sampling, format_of
from jaxshare.serving.workers.prompts.session_prompt import SessionTexts
from jaxshare.serving.workers.roster import Roster, check_names, reserved_blocks
from jaxshare.serving.workers.session_state import (
    FEED_WIDTH,
    FINISHER,
    SessionState,
)
from jaxshare.serving.workers.text.answers import AnswerRule, answer_rule
from jaxshare.serving.workers.text.codec import codec_of
from jaxshare.serving.workers.text.step_automata import STOP_ON, never, step_tables
from jaxshare.trace.recorder import Recorder

if TYPE_CHECKING:
    from jaxshare.serving.engine import Engine


_MAX_BUDGET = 2**31 - 2**10
"""The most forward passes, which devices count in int32."""
_NOT_OF_SESSIONS = ("n", "best_of", "max_tokens", "stop", "include_stop")
"""Fields of samplers that say how a prompt is answered, which no worker does."""
_PASSES_AT_ONCE = 16
"""Passes of a dispatch of a session without an engine, by default."""


@dataclasses.dataclass(frozen=True)
class _SessionPlan:
    """The parts of a session that need no device.

    Attributes:
      make_layout, rule: of layouts and answers.
      tables: the automata that find the ends of steps and of answers.
      roster: the workers and their blocks.
      texts: the prompt and the openings of steps.
      contents: for each block with a text of its own its tokens at the start.
      sizes: for each block the tokens that fit in it.
      needed: the most tokens that any row may see, the finisher's included.
    """

    make_layout: MakeLayout
    rule: AnswerRule
    tables: tuple[TokenAutomaton, TokenAutomaton]
    roster: Roster
    texts: SessionTexts
    contents: Mapping[str, list[int]]
    sizes: Mapping[str, int]
    needed: int

    def digest(self, settings: Mapping[str, Any]) -> str:
        """A hash of what a session's texts follow from. It is the same in every process."""
        names = ("names", "problem", "sampler", "seed", "budget", "stop_on", "together", "move")
        given = [settings[name] for name in names], sorted(self.contents.items())
        return text_digest(repr(given).encode())

    @classmethod
    def create(cls, model: LoadedModel, settings: Mapping[str, Any]) -> Self:
        """The plan of a session with these settings, which `_checked` has returned."""
        names, format, rule = settings["names"], settings["format"], answer_rule(settings["kind"])
        make_layout = layout_maker(settings["layout"])
        layout = make_layout(names, format)
        layout.check(names)
        codec = codec_of(model.tokenizer, model.config.vocab_size)
        tables = step_tables(
            codec, format.separator, rule.automaton if settings["stop_on"] == "answer" else never
        )
        max_workers = _max_workers(settings)
        reserved = reserved_blocks(max_workers - len(names))
        # Workers that join may bring headers that a single worker does without.
        later = make_layout((*names, *reserved), format).texts if reserved else {}
        headers = {b: codec.encode_recurring(text) for b, text in {**later, **layout.texts}.items()}
        roster = Roster.create(names, layout, max_rows=max_workers, small=(*headers, FINISHER))
        texts = SessionTexts.of(codec, format, settings["problem"], roster)
        sizes = _sizes(model, settings, roster, texts, headers)
        views = layout.views(names[-1])
        return cls(
            make_layout=make_layout,
            rule=rule,
            tables=tables,
            roster=roster,
            texts=texts,
            contents={layout.prompt: texts.prompt, **headers},
            sizes=sizes,
            needed=max(sum(sizes[b] for b in (*row, FINISHER)) for row in views),
        )


def create_session(
    model: LoadedModel,
    settings: Mapping[str, Any],
    *,
    implementation: str | None = None,
    engine: "Engine | None" = None,
) -> SessionState:
    """The state of a new session: its prompt is encoded, and nothing is written yet.

    Args:
      model, implementation, engine: see `Workers`.
      settings: its other arguments by name, as given.

    Raises:
      ValueError, TooLongError, EngineError, ClosedError: see `Workers`.
    """
    watch, version = Stopwatch.start(), engine.params_version if engine else 0
    settings = _checked(model, settings, engine)
    names, format = settings["names"], settings["format"]
    plan = _SessionPlan.create(model, settings)
    sampler = _with_forbidden(settings, plan, model)
    # An engine's memory holds keys that are rotated as for the whole context.
    context = model.config.max_positions if engine else plan.needed
    loaded, model = model, model.for_context(context)
    capacities = [plan.sizes.get(block, 0) for block in plan.roster.blocks]
    recorder = Recorder(len(capacities), capacities) if settings["record"] else None
    lease = engine.lease(capacities, plan.digest(settings)) if engine else None
    with _closed_on_failure(lease):
        cache = _empty_cache(model, capacities, lease)
        rows = model.adapted(plan.roster.device_layout)
        session = SessionState(
            settings=settings,
            loaded=loaded,
            model=model,
            module=dataclasses.replace(model.module, implementation=implementation),
            context=context,
            format=format,
            rule=plan.rule,
            make_layout=plan.make_layout,
            sampler=sampler,
            texts=plan.texts,
            instructions=format.instructions(names) + settings["problem"],
            growth=Growth(np.asarray(cache.offsets), np.asarray(cache.capacities)),
            engine=engine,
            lease=lease,
            automata=plan.tables,
            roster=plan.roster,
            rows=rows,
            state=_decode_state(model, settings, plan, rows, cache, sampler, engine),
            recorder=recorder,
            reasons=dict.fromkeys(names, FinishReason.RUNNING),
            prepared=dict.fromkeys(names, 0),
        )
        elsewhere = _fill(session, plan.contents)
        for row, name in enumerate(names):
            session.transcript.join(name, row, 0, plan.texts.first_opening(plan.roster, name))
        session.prepare_openings()
        session.compile_seconds = watch.split()[1] + elsewhere
        return _following(session, version)


def _fill(session: SessionState, contents: Mapping[str, Sequence[int]]) -> float:
    """Feeds what the blocks hold at the start; see `feed_texts`."""
    watch = Stopwatch.start()
    elsewhere = feed_texts(session, contents)
    session.prefill_seconds = watch.split()[0] - elsewhere
    return elsewhere


@contextlib.contextmanager
def _closed_on_failure(lease: KVLease | None) -> Iterator[None]:
    """Gives the memory of a session back at once where it cannot be made, or is interrupted."""
    try:
        yield
    except BaseException:
        if lease:
            lease.close()
        raise


def _following(session: SessionState, version: int) -> SessionState:
    """The session, which has an engine's weights, at first of this version, from now on."""
    if session.engine:
        session.versions.append((0, version))
        session.engine.follow_weights(session)
    return session


def check_min(minimum: int, **numbers: int) -> None:
    """Raises ValueError for the first of some named numbers below a minimum."""
    if low := [name for name, value in numbers.items() if value < minimum]:
        raise ValueError(f"{low[0]} is {numbers[low[0]]}; it must be at least {minimum}")


def _checked(
    model: LoadedModel, settings: Mapping[str, Any], engine: "Engine | None"
) -> dict[str, Any]:
    """The settings with their format and sampler resolved.

    Raises:
      ValueError: see `Workers`.
    """
    check_model(model)
    check_names(settings["names"])
    settings = {**settings, "names": tuple(settings["names"])}
    if settings["passes_at_once"] is None:
        settings["passes_at_once"] = engine.passes if engine else _PASSES_AT_ONCE
    _check_settings(settings)
    if engine and model.params is not engine.model.params:
        raise ValueError("the engine is of another model; give the session engine.model")
    if engine and (model.adapters is None) != (engine.model.adapters is None):
        raise ValueError("the engine's model has adapters; give the session engine.model")
    if engine and _max_workers(settings) > engine.rows:
        raise ValueError(
            f"the session has room for {_max_workers(settings)} workers, but the engine runs "
            f"{engine.rows} rows at a time; create the engine with a larger max_rows"
        )
    check_problem(model, settings["problem"])
    given, sampler = settings["format"], settings["sampler"]
    settings["format"] = format_of(model, given)
    sampler = default_sampler(model) if sampler is None else as_sampler(sampler)
    sampler.refuse(
        _NOT_OF_SESSIONS,
        "a session has steps, a budget of forward passes and answers of its own; leave the field "
        "out, and see budget, stop_on and names",
    )
    seed = as_integer("seed", chosen("seed", settings["seed"], sampler, 0))
    # Two samplers that differ in the seed alone are one to the session's programs and checkpoints.
    settings["sampler"] = sampler = dataclasses.replace(sampler, seed=None)
    settings["seed"] = seed
    warn_of_greedy(model, sampler, discouraged=advises_sampling(given))
    return settings


def check_problem(model: LoadedModel, problem: str) -> None:
    """Raises ValueError for a model without a tokenizer, and for an empty problem."""
    if model.tokenizer is None:
        raise ValueError(
            "workers need a model with a tokenizer; add the tokenizer's files to the model's folder"
        )
    if not isinstance(problem, str):
        raise TypeError(f"the problem is of type {type(problem).__name__}; it must be a str")
    if not problem.strip():
        raise ValueError("the problem is empty; give at least one word")
    check_length(model.tokenizer, len(problem), model.config.max_positions)


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raises ValueError for names, numbers and choices that no session can have."""
    names, ask_every, move = settings["names"], settings["ask_every"], settings["move"]
    max_workers, stop_on = _max_workers(settings), settings["stop_on"]
    positive = ("budget", "finisher_tokens", "passes_at_once")
    check_min(1, **{name: settings[name] for name in positive})
    if (budget := settings["budget"]) > _MAX_BUDGET:
        raise ValueError(f"budget is {budget}; it must be at most {_MAX_BUDGET} forward passes")
    check_min(FEED_WIDTH, step_tokens=settings["step_tokens"])
    if ask_every < 0:
        raise ValueError(
            f"ask_every is {ask_every}; it must be at least 1 token, or 0 for no questions"
        )
    if max_workers < len(names):
        raise ValueError(f"max_workers is {max_workers}, but there are {len(names)} workers")
    if max_workers > MAX_WORKERS:
        raise ValueError(f"max_workers is {max_workers}; a session has at most {MAX_WORKERS}")
    if move not in MOVES:
        raise ValueError(f"move is {move!r}; it must be {' or '.join(map(repr, MOVES))}")
    if stop_on not in STOP_ON:
        raise ValueError(f"stop_on is {stop_on!r}; it must be one of {', '.join(STOP_ON)}")
    answer_rule(settings["kind"])


def _max_workers(settings: Mapping[str, Any]) -> int:
    """The number of rows, those for workers that join later included."""
    given = settings["max_workers"]
    return len(settings["names"]) if given is None else given


def _sizes(
    model: LoadedModel,
    settings: Mapping[str, Any],
    roster: Roster,
    texts: SessionTexts,
    headers: Mapping[str, Sequence[int]],
) -> dict[str, int]:
    """The tokens that fit in each block; see `block_sizes`."""
    codec = texts.codec
    finisher = _finisher_prompt(settings, texts) + settings["finisher_tokens"]
    return block_sizes(
        roster.layout,
        roster.reserved,
        context=model.config.max_positions,
        prompt=len(texts.prompt),
        problem=len(codec.encode(codec.mark(settings["problem"]))),
        texts={block: len(tokens) for block, tokens in headers.items()} | {FINISHER: finisher},
        opening=texts.max_opening(roster),
        budget=settings["budget"],
        ask_every=settings["ask_every"],
        step_tokens=settings["step_tokens"],
        passes_at_once=settings["passes_at_once"],
        history_tokens=settings["history_tokens"],
    )


def _finisher_prompt(settings: Mapping[str, Any], texts: SessionTexts) -> int:
    """The tokens of the longest prompt of an early finisher."""
    prompts = settings["format"].finisher, settings["format"].code_finisher
    return max(len(texts.codec.encode_recurring(text)) for text in prompts)


def _empty_cache(model: LoadedModel, capacities: Sequence[int], lease: KVLease | None) -> KVCache:
    """Creates the blocks of a session, or attaches them on an engine."""
    if lease:
        with lease.exclusive():
            return lease.attach()
    return KVCache.create(
        model.config,
        capacities,
        cache_dtype(model),
        mesh=model.mesh,
        approximate=model.approximate_kv,
    )


def _with_forbidden(settings: Mapping[str, Any], plan: _SessionPlan, model: LoadedModel) -> Sampler:
    """The sampler without the tokens that workers must not sample, for texts after the prompt.

    Stop tokens are allowed with "eos", which they end, and forbidden with "never".
    """
    sampler, format = settings["sampler"].for_prompt(len(plan.texts.prompt)), settings["format"]
    stop_on = settings["stop_on"]
    if sampler.grammar:
        raise ValueError(
            "the sampler has a grammar, but workers write steps in the format of their session; "
            "leave it out"
        )
    stops = {*model.generation.stop_tokens}
    tokens = {*sampler.forbidden, *format.forbidden_tokens(model.tokenizer)}
    if stop_on == "eos":
        tokens -= stops
    elif stop_on == "never":
        tokens |= stops
    sampler = dataclasses.replace(sampler, forbidden=tuple(sorted(tokens)))
    check_sampler(model, sampler)
    return sampler


def _decode_state(
    model: LoadedModel,
    settings: Mapping[str, Any],
    plan: _SessionPlan,
    rows: Layout,
    cache: KVCache,
    sampler: Sampler,
    engine: "Engine | None",
) -> DecodeState:
    """The state of workers that are about to open their first steps.

    Its rows have the shape for an engine's dispatches, or else for the session's own.
    """
    roster, texts = plan.roster, plan.texts
    max_opening = texts.max_opening(roster)
    shape = RowShape.of(
        engine.passes if engine else settings["passes_at_once"],
        pending=max(len(texts.separator) + max_opening, _finisher_prompt(settings, texts)),
        opening_tokens=max_opening,
    )
    openings = [texts.first_opening(roster, name) if name else [] for name in roster.rows]
    ends, closes = plan.tables
    with arrays_on_host():
        steps = Steps.create(
            ends,
            closes,
            roster.targets,
            capacity=shape.outputs,
            openings=shape.openings,
            longest=shape.opening_tokens,
            together=settings["together"],
            on_stop=settings["stop_on"] == "eos",
            ask_every=settings["ask_every"] if settings["format"].question else 0,
            seed=settings["seed"],
        )
        state = DecodeState.create(
            cache,
            rows,
            openings,
            vocab_size=model.config.vocab_size,
            samplers=sampler,
            seeds=settings["seed"],
            max_new_tokens=rounded_budget(settings["budget"]) + 1,
            stops=model.generation.stop_tokens,
            max_width=FEED_WIDTH,
            steps=steps,
            queue=shape.pending,
            capacity=shape.outputs,
            places=MIN_PLACES.grown(SamplerPlaces.of([sampler], model.generation.stop_tokens)),
            texts=_texts_seen(plan, rows, openings),
            record=settings["passes_at_once"] if settings["record"] else 0,
        )
    return on_host(state) if engine else state


def _texts_seen(
    plan: _SessionPlan, rows: Layout, openings: Sequence[Sequence[int]]
) -> list[list[int]]:
    """The tokens that each row sees at first, its opening included."""
    contents = [plan.contents.get(block, ()) for block in plan.roster.blocks]
    return [
        [*(token for block in listed if block >= 0 for token in contents[block]), *opening]
        for listed, opening in zip(np.asarray(rows.blocks).tolist(), openings, strict=True)
    ]
