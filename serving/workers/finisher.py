"""The early finisher: the answer that workers have given, or a guess from what they have written.

Hogwild! Inference, section 4.1 and appendix C.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxshare import DecodeState, FinishReason, KVCache, Layout, decode
from jaxshare.decoding.steps import Steps
from jaxshare.serving.errors import NotANumberError
from jaxshare.serving.workers.results import Answer
from jaxshare.serving.workers.session_state import FEED_WIDTH, FINISHER, SessionState
from jaxshare.serving.workers.text.step_automata import finisher_tables
from jaxshare.trace.recorder import Recorder


def finish(session: SessionState, sees: Sequence[str] | None = None) -> Answer:
    """The answer of a session; see `Workers.finish`. `session.device` is held."""
    session.check_finite()
    if sees is None and (answer := _given_answer(session)) is not None:
        return answer
    sees = session.roster.layout.overview(session.roster.names[-1]) if sees is None else sees
    blocks = session.roster.numbers([*sees, FINISHER])
    _check_context(session, sees, blocks)
    prompt = session.format.code_finisher if session.rule.code else session.format.finisher
    lengths = session.state.cache.lengths + 0  # a copy: the cache is donated
    state = _guess_state(session, blocks, prompt)
    passes = state.pending.shape[1] + session.settings["finisher_tokens"]
    state = decode(session.module, session.model.params, state, passes=passes, width=FEED_WIDTH)
    # Shorter lengths hide what was fed for the guess: the session goes on as if there was none.
    session.keep(dataclasses.replace(state.cache, lengths=lengths))
    session.check_finite()
    if int(state.reasons[0]) == FinishReason.ERROR:
        raise NotANumberError.of("the early answer", f"{session.passes} passes")
    stops, codec = session.model.generation.stop_tokens, session.texts.codec
    text = prompt + codec.decode([token for token in state.outputs()[0] if token not in stops])
    value = session.rule.extract(text) or session.rule.guess(text)
    return Answer(value, text, session.passes, int(state.passes))


def flushed(session: SessionState, recorder: Recorder | None = None) -> KVCache:
    """The cache with the last token that each worker has sampled.

    Otherwise the next pass would feed it, and still will, to the same place. The session fails
    where logits after one of them are not finite, as they would be in that pass.

    Args:
      session: whose cache is donated.
      recorder: to record these tokens with.
    """
    state, roster = session.state, session.roster
    pending, head, num_sampled = (
        np.asarray(a) for a in (state.num_pending, state.head, state.num_sampled)
    )
    free = np.asarray(state.cache.lengths < state.cache.capacities)[roster.writes]
    taken = np.asarray([name is not None for name in roster.rows], bool)
    count = taken & (pending > 0) & (head == 0) & (num_sampled > 0) & free
    tokens = np.asarray(state.pending)[:, :1]
    if recorder:
        recorder.feed(
            [new[:n] for new, n in zip(tokens.tolist(), count.tolist(), strict=True)],
            roster.listed,
        )
    logits, cache = session.model.forward(tokens, count.astype(np.int32), state.cache, session.rows)
    broken = ~np.asarray(jnp.isfinite(logits).all(axis=-1)) & count
    for name in [name for name in roster.names if broken[roster.row(name)]][:1]:
        session.fail(name, session.passes)
    return cache


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


def _guess_state(session: SessionState, blocks: Sequence[int], prompt: str) -> DecodeState:
    """One row that sees `blocks`, writes to the last, and is to sample greedily after the prompt.

    It takes over the session's cache, with the last token of each worker.
    """
    codec, max_tokens = session.texts.codec, session.settings["finisher_tokens"]
    no_step, closes, start = finisher_tables(codec, prompt, session.rule.automaton)
    steps = Steps.create(no_step, closes, [-1], capacity=max_tokens, at_once=True)
    return DecodeState.create(
        flushed(session),
        Layout.from_blocks([blocks], width=len(session.roster.blocks)),
        [codec.encode(prompt)],
        vocab_size=session.model.config.vocab_size,
        max_new_tokens=max_tokens,
        max_width=FEED_WIDTH,
        samplers=dataclasses.replace(session.sampler, temperature=0.0),
        stops=session.model.generation.stop_tokens,
        steps=dataclasses.replace(steps, answer_state=steps.answer_state + start),
    )
