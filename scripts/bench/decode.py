"""Decode speed of a Llama of 125 M parameters in bfloat16 against transformers: same weights, same
cores, same run, in turn.

    python -m scripts.bench.decode                                # the full measurement
    python -m scripts.bench.decode --quick                        # all of it within three minutes on two cores
    python -m scripts.bench.decode --json --output FILE           # one JSON object

transformers runs under a Python of its own that has PyTorch (--torch-python). While one side works
the other waits. Every row has a prompt of its own, so that nothing can be shared; what sharing one
prompt gives is measured beside it, without a goal. How to read the result is in
benchmarks/README.md.
"""

import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare import DecodeState, KVCache, Layout, decode
from jaxshare.models import LoadedModel, load
from scripts.bench.lib import (
    TORCH_PYTHON,
    WAITING,
    Parser,
    Worker,
    WorkerError,
    alternate,
    command,
    cores,
    fastest,
    finish,
    machine,
    progress,
    torch_python,
    versions,
    write_checkpoint,
)
from scripts.bench.parts.decode.report import (
    GOAL_PROMPT,
    OURS,
    SHARED,
    THEIRS,
    as_text,
    goals,
    summarise,
)

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Prompts are fed by this many rows, and this many tokens of all of them, a pass: more is no faster
# and takes more memory.
PREFILL_ROWS, PREFILL_TOKENS = 8, 2048
WORKER = "scripts.bench.peers.torch_decode"


class Run:
    """jaxshare's side of a batch: prompts in the first blocks of a cache, one each, and the decode
    loop over them.

    The loop is `jaxshare.decode` compiled ahead of its use, so that the program whose memory is
    reported is the one that is timed.
    """

    def __init__(
        self,
        model: LoadedModel,
        prompts: np.ndarray,
        rows: Sequence[Sequence[int]],
        capacities: Sequence[int],
        steps: int,
        budget: int,
        first: Sequence[Sequence[int]] | None = None,
    ):
        """prompts int[P, S]; `rows` list their blocks; `first` is what each row feeds before it
        samples, if not its prompt alone."""
        self.model, self.params, self.steps = model, model.params, steps
        self.count, self.length = prompts.shape
        vocab = model.config.vocab_size
        # the prompts' own come with `prefill`
        logits = jnp.zeros((len(rows), vocab)) if first is None else None
        self.state = DecodeState.create(
            KVCache.create(model.config, capacities),
            Layout.from_blocks(rows),
            first or [[]] * len(rows),
            vocab_size=vocab,
            logits=logits,
            budgets=budget,
            max_width=1,
        )
        self.rows = min(self.count, PREFILL_ROWS)
        self.width = min(self.length, PREFILL_TOKENS // self.rows)
        self.groups = [
            Layout.from_blocks(
                [[b] for b in range(i, min(i + self.rows, self.count))], num_rows=self.rows
            )
            for i in range(0, self.count, self.rows)
        ]
        self.prompts = np.zeros(
            (len(self.groups) * self.rows, -(-self.length // self.width) * self.width), np.int32
        )
        self.prompts[: self.count, : self.length] = prompts

    def compile_forward(self) -> None:
        forward = jax.jit(self.model.module.apply, donate_argnums=3)
        tokens, count = self.prompts[: self.rows, : self.width], np.zeros(self.rows, np.int32)
        self.forward = forward.lower(
            self.params, tokens, count, self.state.cache, self.groups[0]
        ).compile()

    def compile_loop(self) -> None:
        loop = jax.jit(
            lambda params, state: decode(self.model.module, params, state, passes=self.steps),
            donate_argnums=1,
        )
        self.loop = loop.lower(self.params, self.state).compile()

    def prefill(self) -> float:
        """Fills the blocks with their prompts and returns the seconds."""
        cache, ends = jax.block_until_ready(self.state.cache), []
        begin = time.perf_counter()
        for g, layout in enumerate(self.groups):
            tokens, used = (
                self.prompts[g * self.rows : (g + 1) * self.rows],
                np.asarray(layout.listed) > 0,
            )
            for at in range(0, self.length, self.width):
                count = np.where(used, min(self.width, self.length - at), 0).astype(np.int32)
                logits, cache = self.forward(
                    self.params, tokens[:, at : at + self.width], count, cache, layout
                )
            ends.append(logits)
        logits = jnp.concatenate(ends)[: self.count]
        if self.count == len(self.state.logits):
            self.state = dataclasses.replace(self.state, logits=logits)
        self.state = jax.block_until_ready(dataclasses.replace(self.state, cache=cache))
        return time.perf_counter() - begin

    def step(self) -> float:
        """Runs `steps` passes and returns their seconds."""
        begin = time.perf_counter()
        self.state = jax.block_until_ready(self.loop(self.params, self.state))
        return time.perf_counter() - begin

    def check(self, passes: int) -> None:
        """Raises RuntimeError where less was done than was to be measured."""
        self.state.cache.check()
        if int(self.state.passes) != passes or not bool(jnp.all(self.state.running)):
            raise RuntimeError(
                f"rows ended before their {passes} steps were done: "
                f"{np.asarray(self.state.reasons).tolist()}"
            )

    def memory(self) -> dict[str, int]:
        """Bytes: what one pass needs besides its arguments, and what it is to be held against."""
        cache = self.state.cache
        layer = cache.keys[0].nbytes + cache.values[0].nbytes
        return {
            "step_temp_bytes": self.loop.memory_analysis().temp_size_in_bytes,
            "one_layer_cache_bytes": layer,
            "cache_bytes": layer * len(cache.keys),
            "parameter_bytes": sum(p.nbytes for p in jax.tree.leaves(self.params)),
        }


def prepare(
    model: LoadedModel, prompts: np.ndarray, steps: int, growth: int, share: bool
) -> dict[str, Run]:
    """jaxshare's sides for prompts int[R, S], compiled, with room for `growth` tokens a row: every
    row with its own prompt in a block of its own; and with `share` all with the first prompt in one
    block, each going on from a token of its own."""
    rows, length = prompts.shape
    budget = growth + 2  # so that no row ends while it is measured
    runs = {
        OURS: Run(
            model, prompts, [[r] for r in range(rows)], (length + growth,) * rows, steps, budget
        )
    }
    if share:
        runs[SHARED] = Run(
            model,
            prompts[:1],
            [[0, r + 1] for r in range(rows)],
            (length, *[growth] * rows),
            steps,
            budget,
            prompts[:, :1].tolist(),
        )
    with ThreadPoolExecutor(cores()) as pool:
        for done in [
            pool.submit(job)
            for run in runs.values()
            for job in (run.compile_loop, run.compile_forward)
        ]:
            done.result()
    return runs


def measure(
    model: LoadedModel,
    worker: Worker,
    prompts: np.ndarray,
    steps: int,
    rounds: int,
    share: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """One batch, prompts int[R, S]; with `share` what one prompt for all rows gives, too.

    The first `steps` steps of each side warm it up; they are compared and not timed.
    """
    rows, growth = len(prompts), steps * (rounds + 1)
    say("compile")
    begin = time.perf_counter()
    runs = prepare(model, prompts, steps, growth, share)
    compiled = time.perf_counter() - begin
    say("prefill")
    prefill = {name: run.prefill() for name, run in runs.items()}
    start = worker.ask("prefill", tokens=prompts.tolist())
    say("warm up")
    trace = worker.ask("trace", steps=steps)
    for run in runs.values():
        run.step()
    agreement = compare(
        runs[OURS].state.outputs(),
        [start["tokens"], *trace["tokens"]],
        [start["near"], *trace["near"]],
    )
    say("decode in turn")
    worker.reset_idle()
    sides = {name: run.step for name, run in runs.items()}
    times = alternate(
        {
            OURS: sides.pop(OURS),
            THEIRS: lambda: worker.ask("step", steps=steps)["seconds"],
            **sides,
        },
        rounds,
    )
    for run in runs.values():
        run.check(growth)
    return {
        **summarise(rows, steps, times),
        "prefill_seconds": prefill | {THEIRS: start["seconds"]},
        "compile_seconds": compiled,
        "memory": {name: run.memory() for name, run in runs.items()},
        "agreement": agreement,
        "cores_busy_while_waiting": {OURS: worker.idle_here.cores, THEIRS: worker.idle_there.cores},
    }


def compare(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], near: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Greedy tokens of both sides, each row up to its first difference: behind that the sides read
    different texts.

    Args:
      ours: [R][N]; theirs: [N][R].
      near: [N][R], by how many spacings of its logits the other side's token beat its second best.
    """
    compared, differences = 0, []
    for r, tokens in enumerate(ours):
        for n, token in enumerate(tokens[: len(theirs)]):
            compared += 1
            if token != theirs[n][r]:
                differences.append(near[n][r])
                break
    return {
        "tokens": compared,
        "equal": compared - len(differences),
        "spacings_at_differences": sorted(differences),
    }


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for; rounds and steps as `--quick` has them where they were not given."""

    batches: tuple[int, ...]
    prompt: int
    rounds: int
    steps: int
    quick: bool
    seed: int
    torch_python: str
    json: bool
    output: Path | None


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(prog="scripts.bench.decode", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--batches",
        default="1,8,64",
        metavar="N,N",
        help="rows decoded at once (default %(default)s)",
    )
    parser.add_argument(
        "--prompt",
        type=int,
        default=GOAL_PROMPT,
        help="tokens of each row's prompt (default %(default)s)",
    )
    parser.add_argument("--rounds", type=int, help="turns of each side (default 5; quick 3)")
    parser.add_argument("--steps", type=int, help="decode steps a turn (default 16; quick 4)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer and shorter turns, one prompt for all in the largest batch alone: within three "
        "minutes on two cores",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument(
        "--torch-python",
        metavar="PATH",
        help=f"a Python with PyTorch and transformers (default {TORCH_PYTHON})",
    )
    parser.reporting()
    given = parser.parse_args(arguments)
    batches = parser.numbers("--batches", given.batches, "1,8,64")
    rounds = given.rounds if given.rounds is not None else 3 if given.quick else 5
    steps = given.steps if given.steps is not None else 4 if given.quick else 16
    if rounds < 1 or steps < 1 or given.seed < 0:
        parser.error(
            f"--rounds is {rounds}, --steps {steps} and --seed {given.seed}, but the first two "
            "must be at least 1 and the last 0"
        )
    most = MODEL["max_position_embeddings"] - steps * (rounds + 1)
    if not 1 <= given.prompt <= most:
        parser.error(
            f"--prompt is {given.prompt}, but with {rounds} rounds of {steps} steps it must be "
            f"from 1 to {most} tokens"
        )
    parser.check_output(given.output)
    return Options(
        batches,
        given.prompt,
        rounds,
        steps,
        given.quick,
        given.seed,
        torch_python(parser, given.torch_python),
        given.json,
        given.output,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = command(
        [str(Path(__file__).resolve()), *(sys.argv[1:] if arguments is None else arguments)]
    )
    where = machine()
    with contextlib.ExitStack() as stack:
        try:
            workers = {
                name: stack.enter_context(Worker(options.torch_python, WORKER, env))
                for name, env in WAITING.items()
            }
            begun = [worker.begin() for worker in workers.values()]
        except WorkerError as error:
            print(
                f"scripts.bench.decode: {options.torch_python} cannot run transformers ({error}): "
                "--torch-python takes a Python that has PyTorch and transformers, such as the one "
                "that `make parity` makes in .venv-torch",
                file=sys.stderr,
            )
            return 2
        try:
            settings, results = measure_all(options, workers)
        except WorkerError as error:
            print(f"scripts.bench.decode: transformers could not go on: {error}", file=sys.stderr)
            return 1
    found = {OURS: versions(("jax", "jaxlib", "flax", "numpy")), THEIRS: begun[0]}
    report = {
        "benchmark": "decode",
        "command": asked,
        "machine": where,
        "versions": found,
        "settings": settings,
        "results": results,
    }
    finish(
        report,
        as_text(report),
        goals(results, options.prompt),
        as_json=options.json,
        output=options.output,
    )
    return 0


def measure_all(
    options: Options, workers: dict[str, Worker]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was measured with, and the results, one a batch."""
    with tempfile.TemporaryDirectory() as folder, progress(len(options.batches) * 4 + 2) as say:
        say("weights")
        parameters = write_checkpoint(Path(folder), MODEL, options.seed)
        model = load(folder)
        say("transformers: load")
        worker, torch = fastest(workers, folder)
        rng, results = np.random.default_rng([options.seed, 1]), []
        for batch in options.batches:
            prompts = rng.integers(0, MODEL["vocab_size"], (batch, options.prompt))
            # it costs half a minute of compilation
            share = batch > 1 and (not options.quick or batch == max(options.batches))
            results.append(
                measure(
                    model,
                    worker,
                    prompts,
                    options.steps,
                    options.rounds,
                    share,
                    lambda what, batch=batch: say(f"batch {batch}, {what}"),
                )
            )
    settings = {
        "parameters": parameters,
        "dtype": "bfloat16",
        "prompt": options.prompt,
        "rounds": options.rounds,
        "steps": options.steps,
        "warm_up_steps": options.steps,
        "quick": options.quick,
        "seed": options.seed,
        "prefill_rows": PREFILL_ROWS,
        "prefill_tokens": PREFILL_TOKENS,
        "torch": torch,
        "model": MODEL,
    }
    return settings, results


if __name__ == "__main__":
    sys.exit(main())
