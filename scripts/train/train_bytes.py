"""Trains a small language model of the bytes of a text, to measure on it what quantising costs.

    python -m scripts.train.train_bytes TEXT               # train, or resume a run that was interrupted, then export to runs/bytes

The first part of the text, TRAINED of it, is learnt from; the rest is held out. Batches are drawn
from the seed and the number of the step alone, so that a resumed run sees what an uninterrupted one
would have.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from jaxshare.models.config import ModelConfig
from jaxshare.models.layers import Decoder
from jaxshare.paths import check_folder
from scripts.train.embedded_data import END, PAD
from scripts.train.embedded_files import architecture, export
from scripts.train.train_embedded import CHUNK, train_step
from scripts.train.training import keep_memory, make_optimizer

TRAINED = 0.95
"""The part of the text that is learnt from."""
LAYERS, HIDDEN = 4, 256
LENGTH, ROWS = 4 * CHUNK, 8
SAVE_SECONDS = 60.0
FILES = ("chat_template.jinja", "workers.json")
"""Those that a model of plain text has no use for."""


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with a token for each byte, and those for padding and the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in (PAD, END)])
    return tokenizer


def make_batch(tokens: np.ndarray, seed: int, step: int) -> np.ndarray:
    """Rows that begin anywhere: int32[ROWS, LENGTH + 1]."""
    starts = np.random.default_rng((seed, step)).integers(0, tokens.size - LENGTH - 1, ROWS)
    return tokens[starts[:, None] + np.arange(LENGTH + 1)]


def train(args: argparse.Namespace) -> None:
    tokenizer = byte_tokenizer()
    config = architecture(tokenizer.get_vocab_size(), LAYERS, HIDDEN)
    text = args.text.read_text(encoding="utf-8")
    tokens = np.asarray(tokenizer.encode(text[: int(TRAINED * len(text))]).ids, np.int32)
    optimizer = make_optimizer(args.steps, args.learning_rate)
    params = Decoder(config).init(
        jax.random.key(args.seed), jnp.zeros((1, 8), jnp.int32), method="causal"
    )
    state = {"params": params, "opt": optimizer.init(params)}
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(args.run_dir.resolve(), options=options) as checkpoints:
        if done := checkpoints.latest_step() or 0:
            state = checkpoints.restore(done, args=ocp.args.StandardRestore(state))
        state = _run(args, config, optimizer, tokens, state, done, checkpoints)
    _write(state["params"], config, tokenizer, args.out)


def _run(
    args: argparse.Namespace,
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    tokens: np.ndarray,
    state: dict,
    done: int,
    checkpoints: ocp.CheckpointManager,
) -> dict:
    """All steps from `done` on; the state after them."""
    saved, losses = time.monotonic(), list[float]()
    weights = np.ones((ROWS, LENGTH), np.float32)
    bar = tqdm(range(done, args.steps), initial=done, total=args.steps, unit="step")
    for step in bar:
        batch = make_batch(tokens, args.seed, step)
        state, loss = train_step(state, batch, weights, config=config, optimizer=optimizer)
        losses = [*losses[-49:], float(loss)]
        bar.set_postfix_str(f"loss {np.mean(losses):.4f}", refresh=False)
        last = step + 1 == args.steps
        if last or time.monotonic() - saved > SAVE_SECONDS:
            checkpoints.save(step + 1, args=ocp.args.StandardSave(state))
            saved = time.monotonic()
    return state


def _write(params: dict, config: ModelConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """The model's folder, without the files of one that is talked to."""
    if folder.exists():
        shutil.rmtree(folder)
    export(params, config, tokenizer, folder)
    for name in FILES:
        (folder / name).unlink()
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(json.dumps({"folder": str(folder), "parameters": size}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, metavar="TEXT", help="a file in UTF-8")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/bytes"))
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path("runs/bytes-steps"),
        help="checkpoints; a run found there is resumed",
    )
    args = parser.parse_args()
    if args.steps <= 0:
        parser.error(f"--steps must be positive; got {args.steps}")
    try:
        check_folder("--run-dir", args.run_dir)
        if args.text.stat().st_size <= 2 * LENGTH:
            parser.error(f"{args.text} is shorter than {2 * LENGTH} bytes; give a longer text")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    keep_memory()
    try:
        train(args)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)


if __name__ == "__main__":
    main()
