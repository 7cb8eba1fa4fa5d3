"""Makes small random checkpoints, what the authors' implementation of Hogwild! Inference computes
with them over shared caches, and where its formatting rules end steps and find answers: the other
side of tests/serving/workers/test_hogwild_parity.py and
tests/serving/workers/test_hogwild_formatting.py.

    git clone https://github.com/eqimp/hogwild_llm
    git -C hogwild_llm checkout a72df341da69fd753c3c82012b920cb998578765
    .venv-hogwild/bin/python scripts/make_hogwild_fixtures.py --hogwild hogwild_llm --out tests/fixtures/hogwild

There are two versions of it. "main" is the code at the top of their repository, at
1a87a99d7a13d4aff93e16f229c6733665754b66 (April 2025): caches whose keys are rotated for each
worker. "inference_lib" is the library in the folder of that name, on the branch of that name, at
the commit above (July 2025): queries are rotated, blocks of code and formulas guarded. A checkout
of the branch has both, "main" unchanged.

Runs in an environment of its own with torch and transformers 4.50; JAX is not needed there. For
each family a folder is written:

    config.json, model.safetensors        the checkpoint, as save_pretrained writes it
    LAYOUT_WORKERS.npz                    one run of "main": its `Script`, and what `run` gives, lists padded with -1
    inference_lib/LAYOUT_WORKERS.npz      the same script, run by "inference_lib"

and beside them, for each version, formatting_VERSION.json: see _hogwild_formatting.py.
"""

import argparse
import copy
import dataclasses
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from _hogwild_formatting import record as record_formatting
from _hogwild_worker import load_attention, load_formatting, load_shared_cache
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    logging,
)

VOCABULARY, PROMPT, HEADER, PASSES, WORKERS = 128, 19, 3, 14, 4
HISTORY, STEP_HEADER, OWN_HEADER, FIRST = 0, 1, 2, 3  # blocks; worker w writes FIRST + w
LAYOUTS = ("contiguous", "interleaved", "combined", "headers")
CASES = [
    (layout, workers)
    for layout in LAYOUTS
    for workers in range(1, WORKERS + 1)
    if layout != "headers" or workers == 2
]

# Of the newer version a few runs, to keep the fixtures small. It takes every worker to see every
# block, which leaves out "interleaved".
CASES_OF = {
    "main": CASES,
    "inference_lib": [
        ("contiguous", 3),
        ("combined", 2),
        ("combined", 3),
        ("combined", 4),
        ("headers", 2),
    ],
}

# Greedy tokens are compared one by one: the best must lead by far more than the tolerance of the
# logits, 1e-4.
MARGIN, DISTINCT = 4e-3, 10

SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    attn_implementation="eager",
)
# In heads this small theta and the original context are such that one frequency lies between
# llama3's two bounds.
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=128,
)
MODELS = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_theta=10_000.0, rope_scaling=LLAMA3)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, rope_theta=1e6)),
}


@dataclasses.dataclass(frozen=True)
class Script:
    """What happens in a run, whatever the model answers. N passes, R workers.

    Attributes:
      rows: for each worker the blocks it sees, in order; it writes the last.
      prompts: for each block the tokens in it before the first pass.
      inserted: [N][R] tokens that a worker is fed in a pass behind the token that it chose last.
      active: bool[N, R], which workers take part in a pass; the others are paused.
      moved: bool[N, R], whose step moves to the history before a pass, in the order of workers.
    """

    rows: list[list[int]]
    prompts: list[list[int]]
    inserted: list[list[list[int]]]
    active: np.ndarray
    moved: np.ndarray


def rows_of(layout: str, workers: int) -> list[list[int]]:
    """The blocks that each worker sees: appendix A of the paper, and with `headers` as in the
    authors' generation.py."""
    blocks = range(FIRST, FIRST + workers)
    between = {
        "interleaved": lambda own: [],
        "contiguous": lambda own: [b for b in blocks if b != own],
        "combined": lambda own: [b for b in blocks if b != own],
        "headers": lambda own: [STEP_HEADER, *(b for b in blocks if b != own), OWN_HEADER],
    }[layout]
    return [[HISTORY, *between(own), own] for own in blocks]


def draw(layout: str, workers: int, rng: np.random.Generator) -> Script:
    """Steps of a few passes each, some of which end together, with headers of several tokens, and a
    worker that is paused."""
    moved = np.zeros((PASSES, workers), bool)
    if layout != "contiguous":  # there a worker's steps stay where they are
        for w in range(workers):
            moved[3 + w :: 4 + w % 2, w] = True
        moved[7] = True
    active = np.ones((PASSES, workers), bool)
    if workers > 1:
        active[5:7, -1] = False
        # Their code cannot read a block that has been emptied and not been written since: a paused
        # worker has begun its step.
        moved[5:7, -1] = False

    def some(count: int) -> list[int]:
        return rng.integers(0, VOCABULARY, count).tolist()

    inserted = [
        [
            some(
                2 + (w + n) % 3
                if n == 0 or moved[n, w]
                else rng.integers(1, 4)
                if rng.random() < 0.15
                else 0
            )
            for w in range(workers)
        ]
        for n in range(PASSES)
    ]
    prompts = [some(PROMPT), some(HEADER), some(HEADER - 1), *[[] for _ in range(workers)]]
    return Script(rows_of(layout, workers), prompts, inserted, active, moved)


class Main:
    """The caches of "main"."""

    def __init__(self, model: PreTrainedModel, shared_cache: ModuleType, script: Script):
        self.model, self.rows = model, script.rows
        self.blocks = [shared_cache.CacheBlock(config=model.config) for _ in script.prompts]
        self.manager = shared_cache.SharedCacheManager(
            cache_structure=[[self.blocks[b] for b in row] for row in script.rows]
        )

    def prefill(self, block: int, tokens: torch.Tensor) -> None:
        self.model(tokens, use_cache=True, past_key_values=self.blocks[block])

    def move(self, block: int) -> None:
        self.blocks[HISTORY].append_from(self.blocks[block], keep_other=False)

    def forward(self, tokens: torch.Tensor, real: torch.Tensor, active: list[int]) -> np.ndarray:
        return (
            self.model(**self.manager.get_input_kwargs(tokens, real, active_worker_indices=active))
            .logits[:, -1]
            .numpy()
        )


class InferenceLib:
    """The caches of "inference_lib", with its attention of plain PyTorch, which it takes for models
    that are loaded as "eager"."""

    def __init__(self, model: PreTrainedModel, attention: ModuleType, script: Script):
        assert model.config._attn_implementation == "eager"
        self.model, self.rows, self.attention = copy.deepcopy(model), script.rows, attention
        attention.model_surgery(self.model)
        self.blocks = [DynamicCache() for _ in script.prompts]

    def prefill(self, block: int, tokens: torch.Tensor) -> None:
        self.model(
            tokens,
            use_cache=True,
            past_key_values=self.attention.HogwildCache([[self.blocks[block]]], model=self.model),
        )

    def move(self, block: int) -> None:
        self.attention.merge_caches(self.blocks[HISTORY], self.blocks[block], self.model.model)
        self.blocks[block].crop(0)

    def forward(self, tokens: torch.Tensor, real: torch.Tensor, active: list[int]) -> np.ndarray:
        # A cache there is for a fixed set of workers; those of the active ones share the blocks of
        # all.
        cache = self.attention.HogwildCache(
            [[self.blocks[b] for b in self.rows[w]] for w in active], model=self.model
        )
        return self.model(**cache.get_input_kwargs(tokens, real)).logits[:, -1].numpy()


def run(side: Main | InferenceLib, script: Script) -> tuple[np.ndarray, np.ndarray]:
    """Plays a script: logits float32[N, R, V] after each worker's last token, and the greedy
    int32[N, R]; 0 where one is paused."""
    for block, prompt in enumerate(script.prompts):
        if prompt:
            side.prefill(block, torch.tensor([prompt]))
    last: list[list[int]] = [[] for _ in script.rows]
    logits = np.zeros((PASSES, len(script.rows), VOCABULARY), np.float32)
    greedy = np.zeros((PASSES, len(script.rows)), np.int32)
    for n in range(PASSES):
        for w in np.flatnonzero(script.moved[n]):
            side.move(script.rows[w][-1])
        active = np.flatnonzero(script.active[n])
        new = [last[w] + script.inserted[n][w] for w in active]
        width = max(map(len, new))
        tokens = torch.tensor([[0] * (width - len(t)) + t for t in new])
        real = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in new])
        logits[n, active] = side.forward(tokens, real, active.tolist())
        greedy[n, active] = logits[n, active].argmax(axis=-1)
        for w in active:
            last[w] = [int(greedy[n, w])]
    return logits, greedy


def without_ties(logits: np.ndarray, greedy: np.ndarray, active: np.ndarray) -> bool:
    """Whether the greedy tokens vary, and none of them is a near tie that rounding could change."""
    second, best = np.moveaxis(np.sort(logits, axis=-1)[..., -2:], -1, 0)
    return (
        bool(np.all((best - second)[active] > MARGIN))
        and len(np.unique(greedy[active])) >= DISTINCT
    )


def fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Random weights under which attention is peaked, texts do not fall into loops at once, and
    logits are of order 1 to 5."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1:
            weight.data = 0.2 * noise if name.endswith("bias") else 1.0 + 0.2 * noise
        else:
            weight.data = noise if "embed_tokens" in name else 1.5 * noise / weight.shape[1] ** 0.5


def record(path: Path, script: Script, logits: np.ndarray, greedy: np.ndarray) -> None:
    """Writes a run; lists of lists are padded behind with -1 to arrays [.., longest]."""

    def padded(lists: list[list[int]]) -> np.ndarray:
        return np.asarray([[*t, *[-1] * (max(map(len, lists)) - len(t))] for t in lists], np.int32)

    inserted = padded([tokens for of_pass in script.inserted for tokens in of_pass])
    np.savez_compressed(
        path,
        rows=padded(script.rows),
        prompts=padded(script.prompts),
        inserted=inserted.reshape(*greedy.shape, -1),
        active=script.active,
        moved=script.moved,
        logits=logits,
        greedy=greedy,
    )


def make(
    family: str,
    folder: Path,
    sides: dict[str, tuple[type[Main | InferenceLib], ModuleType]],
    seed: int,
) -> None:
    """Writes a checkpoint and the runs of each version, instead of those that were there."""
    model = MODELS[family]().eval()
    fill(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    for version, (side, module) in sides.items():
        runs = folder if version == "main" else folder / version
        runs.mkdir(exist_ok=True)
        for old in runs.glob("*.npz"):
            old.unlink()
        for layout, workers in CASES_OF[version]:
            for attempt in range(100):
                script = draw(
                    layout,
                    workers,
                    np.random.default_rng([seed, CASES.index((layout, workers)), attempt]),
                )
                logits, greedy = run(side(model, module, script), script)
                if without_ties(logits, greedy, script.active):
                    break
            else:
                raise RuntimeError(
                    f"{family}, {layout}, {workers} workers: no run has varied greedy tokens "
                    "without near ties"
                )
            record(runs / f"{layout}_{workers}.npz", script, logits, greedy)
            print(
                f"{version:13s} {family:6s} {layout:11s} {workers} workers: logits std "
                f"{logits[script.active].std():.2f}, drawn {attempt + 1} times",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--hogwild",
        required=True,
        metavar="DIR",
        help="a checkout of https://github.com/eqimp/hogwild_llm",
    )
    parser.add_argument(
        "--versions",
        nargs="+",
        choices=[*CASES_OF],
        help="which to make; default those that the checkout has",
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "tests" / "fixtures" / "hogwild"
    )
    options = parser.parse_args()
    versions = options.versions or [
        "main",
        *(["inference_lib"] if (Path(options.hogwild) / "inference_lib").is_dir() else []),
    ]
    sides: dict[str, tuple[type[Main | InferenceLib], ModuleType]] = {}
    try:
        formatting = {version: load_formatting(options.hogwild, version) for version in versions}
        if "main" in versions:
            sides["main"] = Main, load_shared_cache(options.hogwild)
        if "inference_lib" in versions:
            sides["inference_lib"] = InferenceLib, load_attention(options.hogwild)
    except ValueError as error:
        parser.error(str(error))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(
            f"--out is {options.out}, which cannot be made ({error.strerror}); name a folder that "
            "can be written"
        )
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # one order of summation everywhere
    for version in versions:
        record_formatting(options.out / f"formatting_{version}.json", formatting[version])
    with torch.no_grad():
        for seed, family in enumerate(MODELS):
            make(family, options.out / family, sides, seed)


if __name__ == "__main__":
    main()
