"""The early finisher: the answer that workers have given, or a guess from what they have written.

Hogwild! Inference, section 4.1 and appendix C.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import DecodeState, FinishReason, Layout, Sampler
from jaxshare.decoding.array_rows import arrays_on_host
from jaxshare.decoding.steps import Steps
from jaxshare.serving.errors import NotANumberError
from jaxshare.serving.workers.dispatch import run_beside
from jaxshare.serving.workers.results import Answer
from jaxshare.serving.workers.session_state import FEED_WIDTH, FINISHER, SessionState
from jaxshare.serving.workers.text.step_automata import finisher_tables
from jaxshare.trace.recorder import Recorder


def finish(session: SessionState, sees: Sequence[str] | None = None) -> Answer:
    """The answer of a session; see `Workers.finish`."""
    session.check_finite()
    if sees is None and (answer := _given_answer(session)) is not None:
        return answer
    sees = session.roster.layout.overview(session.roster.names[-1]) if sees is None else sees
    blocks = session.roster.numbers([*sees, FINISHER])
    _check_context(session, sees, blocks)
    prompt = session.format.code_finisher if session.rule.code else session.format.finisher
    lengths = flush(session)
    session.check_finite()
    guess, passes = _guess(session, lengths, blocks, prompt)
    stops, codec = session.model.generation.stop_tokens, session.texts.codec
    text = prompt + codec.decode([token for token in guess if token not in stops])
    value = session.rule.extract(text) or session.rule.guess(text)
    return Answer(value, text, session.passes, passes)


def flush(session: SessionState, recorder: Recorder | None = None) -> Array:
    """Feeds the last token that each worker has sampled.

    Otherwise the next pass would feed it, and still will, to the same place: shorter lengths hide
    it again. The session fails where logits after one of them are not finite, as they would be in
    that pass.

    Args:
      session: whose blocks keep their lengths.
      recorder: to record these tokens with.

    Returns:
      int32[B], the lengths with these tokens.
    """
    state, roster = session.state, session.roster
    pending, head, num_sampled = (
        np.asarray(a) for a in (state.num_pending, state.head, state.num_sampled)
    )
    free = np.asarray(state.cache.lengths < state.cache.capacities)[roster.writes]
    taken = np.asarray([name is not None for name in roster.rows], bool)
    count = taken & (pending > 0) & (head == 0) & (num_sampled > 0) & free
    if recorder:
        tokens = np.asarray(state.pending)[:, :1].tolist()
        recorder.feed(
            [new[:n] for new, n in zip(tokens, count.tolist(), strict=True)], roster.listed
        )
    reasons = np.where(count, FinishReason.RUNNING.value, FinishReason.UNUSED.value)
    part = dataclasses.replace(
        state.without_outputs(),
        **({} if session.shares_passes else _donated(state)),
        num_pending=count.astype(np.int32),
        max_new_tokens=state.num_sampled + 0,  # none is sampled
        reasons=reasons.astype(np.int32),
        session=np.arange(len(count), dtype=np.int32),
        halts=np.zeros(len(count), bool),
    )
    after = run_beside(session, part, 1, automata=session.automata, listed=roster.listed)
    broken = np.asarray(after.reasons) == FinishReason.ERROR
    for name in [name for name in roster.names if broken[roster.row(name)]][:1]:
        session.fail(name, session.passes)
    return after.cache.lengths


def _donated(state: DecodeState) -> dict[str, Any]:
    """Copies of what passes of a session alone take, which goes on with its own."""
    return {name: jax.tree.map(jnp.copy, getattr(state, name)) for name in ("logits", "top_logits")}


def _given_answer(session: SessionState) -> Answer | None:
    """The last valid answer in the workers' steps, or None; people's steps do not count."""
    transcript = session.transcript
    steps = [step for step in transcript.steps if step.worker not in session.people]
    value = next(filter(None, map(session.answer_of, reversed(steps))), None)
    if value is None:
        return None
    return Answer(value, "".join(step.text for step in steps), session.passes, 0)


def _check_context(session: SessionState, sees: Sequence[str], blocks: Sequence[int]) -> None:
    """Raises ValueError if the finisher's blocks do not fit in the context together."""
    *seen, own = blocks
    tokens = int(np.sum(np.asarray(session.state.cache.lengths)[seen]))
    needed, context = int(session.capacities[own]), session.loaded.config.max_positions
    if tokens + needed > context:
        raise ValueError(
            f"{', '.join(sees)} have {tokens} tokens together, and the early-stop prompt needs "
            f"room for {needed}, but the model's context holds {context}; name fewer blocks in "
            "sees"
        )


def _guess(
    session: SessionState, lengths: Array, blocks: Sequence[int], prompt: str
) -> tuple[list[int], int]:
    """Samples greedily in a row that sees blocks of these lengths, after a prompt in the last one.

    Returns:
      The tokens, and the passes that it took.
    """
    codec, own = session.texts.codec, session.state
    max_tokens, fed = session.settings["finisher_tokens"], codec.encode(prompt)
    no_step, closes, start = finisher_tables(codec, prompt, session.rule.automaton)
    # On an engine any number of rows can run. Alone, the session's program is for as many as these.
    rows = 1 if session.shares_passes else own.layout.num_rows
    listed = [blocks, *[()] * (rows - 1)]
    sizes = {"width": own.layout.blocks.shape[1], "groups": own.layout.groups}
    layout = session.model.adapted(Layout.from_blocks(listed, **sizes))
    capacity, num_openings, longest = own.tokens.shape[1], *own.steps.openings.shape[1::2]
    with arrays_on_host():
        steps = Steps.create(
            no_step,
            closes,
            [-1] * rows,
            capacity=capacity,
            openings=num_openings,
            longest=longest,
            at_once=True,
        )
        state = DecodeState.create(
            dataclasses.replace(own.cache, lengths=lengths + 0),
            layout,
            [fed, *[()] * (rows - 1)],
            vocab_size=session.model.config.vocab_size,
            max_new_tokens=max_tokens,
            max_width=FEED_WIDTH,
            samplers=Sampler(bias=session.sampler.bias, forbidden=session.sampler.forbidden),
            stops=session.model.generation.stop_tokens,
            steps=dataclasses.replace(steps, answer_state=steps.answer_state + start),
            queue=own.queue_capacity,
            capacity=capacity,
            places=own.samplers.places,
            record=own.record.capacity,
        )
    found: list[int] = []
    while int(state.reasons[0]) == FinishReason.RUNNING:
        state = run_beside(
            session,
            state.without_outputs(),
            session.settings["passes_at_once"],
            automata=(no_step, closes),
            listed=listed,
        )
        found += state.outputs()[0]
    if int(state.reasons[0]) == FinishReason.ERROR:
        raise NotANumberError.of("the early answer", f"{session.passes} passes")
    return found, int(state.clock[0])
