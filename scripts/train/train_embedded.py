"""Trains a model on generated problems from scratch, exports it in Hugging Face form, and measures
such a model.

    python -m scripts.train.train_embedded                 # train, or resume a run that was interrupted, then export to runs/first-model
    python -m scripts.train.train_embedded --evaluate      # greedy accuracy of the embedded model on 500 unseen problems

It is the first half of how the embedded model was made: scripts/train/train_workers.py has then
taught it to be one of several workers.

Data is drawn from the seed and the number of the step alone, so that a resumed run sees what an
uninterrupted one would have.
"""

import argparse
import functools
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import Array
from tokenizers import Tokenizer
from tqdm import tqdm

from jaxshare import DecodeState, KVCache, Layout, decode
from jaxshare.models import EMBEDDED, load
from jaxshare.models.config import ModelConfig
from jaxshare.models.layers import Decoder
from jaxshare.paths import check_folder
from jaxshare.rope import rotate
from jaxshare.serving.evaluation.arithmetic import (
    MAX_QUESTIONS,
    SumsProblem,
    check,
    few_shot_messages,
    make_problem,
    refusal,
    typed_problem,
)
from jaxshare.serving.evaluation.arithmetic_forms import FORMS
from scripts.train.embedded_data import (
    Codec,
    batch,
    few_shot_sample,
    lone_sample,
    simulate,
    train_tokenizer,
    view_sample,
)
from scripts.train.embedded_files import architecture, export
from scripts.train.other_requests import HELD_OUT
from scripts.train.training import keep_memory, make_optimizer

VOCAB_SIZE = 402
LENGTH, ROWS, CHUNK = 384, 8, 64
WIDTH = 64
LONG_LENGTH, LONG_ROWS, LONG_EVERY = 1024, 2, 6
EXAMPLES = 2
TYPED_LENGTH = 512
VIEWS, LATE_VIEWS, LATE_FROM = 0.4, 0.6, 0.5
EVALUATE_EVERY, SAVE_SECONDS = 250, 120.0


def make_batch(codec: Codec, seed: int, step: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The batch of one step: lone solutions and two-worker views; in the second part of a run more
    views, and sometimes few-shot chats."""
    rng = random.Random(f"train/{seed}/{step}")
    late = step >= LATE_FROM * steps
    if late and step % LONG_EVERY == 0:
        return batch(
            codec, [few_shot_sample(codec, rng, LONG_LENGTH) for _ in range(LONG_ROWS)], LONG_LENGTH
        )
    samples = []
    while len(samples) < ROWS:
        sample = (view_sample if rng.random() < (LATE_VIEWS if late else VIEWS) else lone_sample)(
            codec, rng
        )
        # two workers of very uneven pace wait more than is worth learning from
        if len(sample[0]) <= LENGTH + 1:
            samples.append(sample)
    return batch(codec, samples, LENGTH)


def causal_logits(module: Decoder, tokens: Array) -> Array:
    """`Decoder.causal`, with an attention that is twice as fast on a CPU. int32[R, T] -> float32[R,
    T, V]."""
    cos, sin = module.config.rope.cos_sin(jnp.arange(tokens.shape[1])[:, None])
    return module._logits(
        module._trunk(
            tokens,
            lambda _, q, k, v, sinks: causal_attention(rotate(q, cos, sin), rotate(k, cos, sin), v),
        )
    )


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Queries in chunks, each against the keys up to its end alone: about 60% of the full square of
    scores.

    q [R, T, H, D]; k, v [R, T, K, D]; T a multiple of CHUNK; returns [R, T, H, D].
    """
    rows, size, heads, dim = q.shape
    kv_heads, groups = k.shape[2], heads // k.shape[2]
    q = (
        (q * dim**-0.5)
        .reshape(rows, size // CHUNK, CHUNK, kv_heads, groups, dim)
        .transpose(1, 0, 3, 4, 2, 5)
    )
    q = q.reshape(size // CHUNK, rows * kv_heads, groups * CHUNK, dim)
    k, v = (x.transpose(0, 2, 1, 3).reshape(rows * kv_heads, size, dim) for x in (k, v))
    out = []
    for i, queries in enumerate(q):
        end = (i + 1) * CHUNK
        scores = jax.lax.dot_general(queries, k[:, :end], (((2,), (2,)), ((0,), (0,))))
        mask = jnp.tile(jnp.arange(end) <= jnp.arange(end - CHUNK, end)[:, None], (groups, 1))
        out.append(
            jax.lax.dot_general(
                jax.nn.softmax(jnp.where(mask, scores, -1e30)),
                v[:, :end],
                (((2,), (1,)), ((0,), (0,))),
            )
        )
    out = jnp.stack(out).reshape(size // CHUNK, rows, kv_heads, groups, CHUNK, dim)
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(rows, size, heads, dim)


@functools.partial(jax.jit, static_argnames=("config", "optimizer"), donate_argnames="state")
def train_step(
    state: dict, tokens: Array, weights: Array, *, config: ModelConfig, optimizer
) -> tuple[dict, Array]:
    """One update. tokens int32[R, T + 1], weights float32[R, T] -> new state and the mean loss of
    the weighted tokens, in nats."""

    def loss_of(params):
        logits = Decoder(config).apply(params, tokens[:, :-1], method=causal_logits)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.sum(losses * weights) / jnp.sum(weights)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = optimizer.update(gradients, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def complete(
    params: dict,
    config: ModelConfig,
    codec: Codec,
    prompts: list[list[int]],
    stops: set[int],
    size: int,
    rows: int = 64,
) -> list[list[int]]:
    """The greedy text of the model after each prompt, up to and with the first of `stops`, or to a
    total of `size` tokens."""
    written, layout = [], Layout.from_blocks([[row] for row in range(rows)])
    for start in tqdm(range(0, len(prompts), rows), "generating", file=sys.stderr, leave=False):
        group = prompts[start : start + rows]
        group += [group[0]] * (rows - len(group))  # so that all groups share one program
        cache = KVCache.create(config, [size] * rows, jnp.float32)
        state = DecodeState.create(
            cache,
            layout,
            group,
            vocab_size=config.vocab_size,
            max_new_tokens=[size - len(prompt) for prompt in group],
            capacity=size,
            queue=size,
            stops=sorted(stops),
            max_width=WIDTH,
        )
        written += decode(Decoder(config), params, state, passes=size, width=WIDTH).outputs()
    return written[: len(prompts)]


def evaluate(
    params: dict, config: ModelConfig, codec: Codec, problems: int, seed: int = 0
) -> dict[str, float]:
    """Greedy accuracy on problems that no training step draws: of single questions and whole
    problems solved by a lone worker; of what is left of a paragraph that one of two workers writes,
    which must be the rule's to the letter; and of questions asked after EXAMPLES solved problems (a
    fifth as many of those)."""
    rng = random.Random(f"held-out/{seed}")
    alone = [make_problem(rng) for _ in range(problems)]
    texts = map(
        codec.text,
        complete(
            params, config, codec, [codec.chat(p.messages()) for p in alone], {codec.end}, LENGTH
        ),
    )
    right = [check(text, problem) for text, problem in zip(texts, alone, strict=True)]
    views = []
    while len(views) < problems:
        view = rng.choice(simulate(codec, make_problem(rng), rng))
        if len(view.context) + len(view.body) < LENGTH:
            views.append(view)
    stops = {codec.end, codec.separator}
    bodies = complete(params, config, codec, [v.context for v in views], stops, LENGTH)
    shot = [
        ([make_problem(rng) for _ in range(EXAMPLES)], make_problem(rng))
        for _ in range(-(-problems // 5))
    ]
    prompts = [codec.chat(few_shot_messages(examples, problem)) for examples, problem in shot]
    texts = map(
        codec.text,
        complete(params, config, codec, prompts, {codec.end}, max(map(len, prompts)) + LENGTH),
    )
    few_shot = [check(text, problem) for text, (_, problem) in zip(texts, shot, strict=True)]
    return {
        "problems": problems,
        "question_accuracy": float(np.mean(right)),
        "problem_accuracy": float(np.mean(np.all(right, -1))),
        "two_worker_paragraph_accuracy": float(
            np.mean([b[:-1] == v.body[v.written :] for b, v in zip(bodies, views, strict=True)])
        ),
        "few_shot_question_accuracy": float(np.mean(few_shot)),
        "few_shot_prompt_tokens": float(np.mean([*map(len, prompts)])),
        "other_requests_refused": refused_part(params, config, codec),
        **typed_accuracy(params, config, codec, -(-problems // 5), rng),
    }


def refused_part(params: dict, config: ModelConfig, codec: Codec) -> float:
    """The part of requests for something else that get the one sentence, greedily, and no more."""
    prompts = [codec.chat([{"role": "user", "content": request}]) for request in HELD_OUT]
    written = complete(params, config, codec, prompts, {codec.end}, LENGTH)
    sentence = [*codec.encode(refusal()), codec.end]
    return float(np.mean([[*made] == sentence for made in written]))


def typed_accuracy(
    params: dict, config: ModelConfig, codec: Codec, problems: int, rng: random.Random
) -> dict[str, float]:
    """Greedy accuracy of questions as a person types them, one to ten in a message: in each form in
    a chat without a message of the system, and in all forms as plain text without a template."""

    def accuracy(asked: Sequence[SumsProblem], prompts: list[list[int]]) -> float:
        written = complete(
            params, config, codec, prompts, {codec.end}, max(map(len, prompts)) + TYPED_LENGTH
        )
        return float(
            np.mean(
                [
                    right
                    for made, problem in zip(written, asked, strict=True)
                    for right in check(codec.text(made), problem)
                ]
            )
        )

    found = {}
    for name, form in FORMS.items():
        asked = [typed_problem(rng, rng.randint(1, MAX_QUESTIONS), form) for _ in range(problems)]
        found[f"typed: {name}"] = accuracy(
            asked, [codec.chat([{"role": "user", "content": p.prompt()}]) for p in asked]
        )
    asked = [
        typed_problem(rng, rng.randint(1, MAX_QUESTIONS), form)
        for _ in range(-(-problems // len(FORMS)))
        for form in FORMS.values()
    ]
    return {
        **found,
        "typed, no template": accuracy(asked, [codec.encode(p.prompt()) for p in asked]),
    }


def train(args: argparse.Namespace) -> None:
    tokenizer = train_tokenizer(VOCAB_SIZE, args.seed)
    codec, config = Codec(tokenizer), architecture(tokenizer.get_vocab_size())
    optimizer = make_optimizer(args.steps, args.learning_rate)
    params = Decoder(config).init(
        jax.random.key(args.seed), jnp.zeros((1, 8), jnp.int32), method="causal"
    )
    state = {"params": params, "opt": optimizer.init(params)}
    size = sum(p.size for p in jax.tree.leaves(params))
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(args.run_dir.resolve(), options=options) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:
            state = checkpoints.restore(done, args=ocp.args.StandardRestore(state))
        tqdm.write(
            f"{size / 1e6:.2f} M parameters, {config.vocab_size} tokens; steps {done} to "
            f"{args.steps}",
            file=sys.stderr,
        )
        saved, accuracy, losses = time.monotonic(), "", []
        bar = tqdm(
            range(done, args.steps),
            initial=done,
            total=args.steps,
            unit="step",
            file=sys.stderr,
            mininterval=args.log_seconds,
        )
        began, tokens_seen = time.monotonic(), 0
        for step in bar:
            tokens, weights = make_batch(codec, args.seed, step, args.steps)
            state, loss = train_step(state, tokens, weights, config=config, optimizer=optimizer)
            losses = [*losses[-49:], float(loss)]
            tokens_seen += tokens.size
            rate = tokens_seen / (time.monotonic() - began)
            bar.set_postfix_str(
                f"loss {np.mean(losses):.4f}, {rate:.0f} tokens/s{accuracy}", refresh=False
            )
            last = step + 1 == args.steps
            if (step + 1) % EVALUATE_EVERY == 0 or last:
                scores = evaluate(state["params"], config, codec, 32, seed=1)
                accuracy = f", questions {scores['question_accuracy']:.1%}, views {scores['two_worker_paragraph_accuracy']:.1%}"
                tqdm.write(
                    f"step {step + 1}: loss {np.mean(losses):.4f}{accuracy}", file=sys.stderr
                )
            if last or time.monotonic() - saved > SAVE_SECONDS:
                checkpoints.save(step + 1, args=ocp.args.StandardSave(state))
                saved = time.monotonic()
    export(state["params"], config, tokenizer, args.out)
    tqdm.write(f"exported to {args.out}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out",
        type=Path,
        help="where the model is exported to and evaluated from (default runs/first-model, "
        "and the embedded model with --evaluate)",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path("runs/embedded"),
        help="checkpoints; a run found there is resumed",
    )
    parser.add_argument(
        "--log-seconds", type=float, default=0.5, help="seconds between updates of the progress bar"
    )
    parser.add_argument("--evaluate", action="store_true", help="only measure the model in --out")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument(
        "--json", action="store_true", help="print the measurement as one JSON object"
    )
    args = parser.parse_args()
    for name in ("steps", "problems", "learning_rate"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive; got {getattr(args, name)}")
    if args.out is None:
        args.out = EMBEDDED if args.evaluate else Path("runs/first-model")
    if not args.evaluate:
        try:
            check_folder("--out", args.out)
            check_folder("--run-dir", args.run_dir)
        except ValueError as error:
            parser.error(str(error))
    keep_memory()
    if not args.evaluate:
        train(args)
    try:
        model, tokenizer = load(args.out), Tokenizer.from_file(str(args.out / "tokenizer.json"))
    except (FileNotFoundError, ValueError) as error:
        parser.error(f"{error}; train a model into {args.out} first, without --evaluate")
    scores = evaluate(model.params, model.config, Codec(tokenizer), args.problems)
    print(
        json.dumps(scores)
        if args.json
        else "\n".join(f"{key}: {value:.4g}" for key, value in scores.items())
    )


if __name__ == "__main__":
    main()
