"""The sizes and the command line of the benchmark of sharing."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.bench.lib import ROOT, Parser, data_file
from scripts.bench.parts.decode import sides as decode_sides
from scripts.bench.parts.sharing import plots
from scripts.bench.peer import TORCH_PYTHON, other_python

MODEL = decode_sides.MODEL | {
    "num_attention_heads": 8,
    "num_hidden_layers": 10,
    "max_position_embeddings": 32768,
}
"""108 M parameters."""


TEXT_MODEL = MODEL | {"num_hidden_layers": 4}
"""For the needles, with the embedded model's tokenizer and as large a vocabulary: 29 M
parameters."""


PAPER_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128}
"""Of section 4.2."""


QUICK_LAYERS = 1
"""With --quick the last three parts run this many layers, because compiling more would take most of
the time."""


PARTS = ("attention", "end-to-end", "needles", "levels", "rule")


TORCH_PARTS = {"attention", "end-to-end"}


DEFAULT_TEXT = "war_and_peace.txt"


PLOTS = ROOT / "benchmarks" / "plots"


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a measurement; lengths in tokens.

    Attributes:
      attention: "rows", "prefixes" and "suffixes".
      batches, prefixes, steps, their_steps: end to end; the steps are those of a turn.
      document, questions: of the needles; documents: lengths that are held against each other;
        most_rows: completions at a time; other_sides: whether they are asked without attention and,
        the fewest, without sharing too.
      few_shot, problem, new_tokens, batch, problems, samples: of the two levels; equal_batch:
        whether two levels are measured with as many rows as one, too.
      rule_rows, rule_prefixes: of the cost rule.
      rounds, runs: turns of each side where a turn is short, and where it is a whole run of
        `generate`.
    """

    attention: Mapping[str, Sequence[int]]
    batches: Sequence[int]
    prefixes: Sequence[int]
    steps: int
    their_steps: int
    document: int
    questions: Sequence[int]
    documents: Sequence[int]
    most_rows: int
    other_sides: bool
    few_shot: int
    problem: int
    new_tokens: int
    batch: int
    problems: int
    samples: int
    equal_batch: bool
    rule_rows: Sequence[int]
    rule_prefixes: Sequence[int]
    rounds: int
    runs: int


FULL = Scale(
    attention={"rows": (16, 64, 256, 1024), "prefixes": (1024, 4096, 16384), "suffixes": (64, 512)},
    batches=(16, 64, 256),
    prefixes=(1024, 4096, 16384),
    steps=8,
    their_steps=2,
    document=16384,
    questions=(16, 32, 64, 128, 256),
    documents=(4096, 8192),
    most_rows=256,
    other_sides=True,
    few_shot=1024,
    problem=256,
    new_tokens=128,
    batch=32,
    problems=8,
    samples=16,
    equal_batch=True,
    rule_rows=(2, 4, 8, 16, 64),
    rule_prefixes=(16, 64, 256, 1024, 4096),
    rounds=5,
    runs=3,
)


QUICK = Scale(
    attention={"rows": (64,), "prefixes": (4096,), "suffixes": (64,)},
    batches=(64,),
    prefixes=(4096,),
    steps=8,
    their_steps=1,
    document=2048,
    questions=(8, 16),
    documents=(),
    most_rows=8,
    other_sides=False,
    few_shot=256,
    problem=128,
    new_tokens=32,
    batch=8,
    problems=4,
    samples=8,
    equal_batch=False,
    rule_rows=(8,),
    rule_prefixes=(1024,),
    rounds=9,
    runs=1,
)
"""Compiling takes most of the time, so it has few programs rather than short turns."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run.

    `torch_python` is None without PyTorch, `text` where no needles are hidden, `plots` where none
    are drawn. `left_out` are parts that cannot be measured here, and why.
    """

    parts: tuple[str, ...]
    scale: Scale
    quick: bool
    heads: str
    most_bytes: int
    seed: int
    model: Path | str | None
    text: Path | None
    torch_python: str | None
    json: bool
    output: Path | None
    plots: Path | None
    left_out: Mapping[str, str]


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(
        prog="scripts.bench.sharing",
        description="Sharing of prefixes against not sharing them.",
    )
    parser.add_argument(
        "--parts",
        metavar="P,P",
        help=f"what to measure (default {','.join(PARTS)}; needles where there is a text)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer and smaller points, fewer turns: within three minutes on two cores",
    )
    parser.add_argument(
        "--rounds", type=int, help="turns of each side (default 5, of whole runs 3; quick 9 and 1)"
    )
    parser.add_argument(
        "--heads",
        choices=("model", "paper"),
        default="model",
        help="of the attention part: the model's (8 heads, 4 kv heads, dimension 64) or section "
        "4.2's (8, 1, 128)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="what needles are hidden in (default war_and_peace.txt in $JAXSHARE_DATA or "
        "../shared/data)",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a model with a tokenizer that answers the questions (default random weights)",
    )
    parser.add_argument(
        "--document",
        type=int,
        metavar="N",
        help="tokens of the document (default 16384; quick 2048)",
    )
    parser.add_argument(
        "--problems", type=int, metavar="N", help="of the levels part (default 8; quick 4)"
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="of each problem (default 16; quick 8)"
    )
    parser.add_argument(
        "--max-copies-gib",
        type=float,
        default=4.0,
        metavar="GIB",
        help="leave out what would take more memory for copies of the prefix (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts, keys and values")
    parser.add_argument(
        "--torch-python",
        metavar="PATH",
        help=f"a Python with PyTorch and transformers (default {TORCH_PYTHON})",
    )
    parser.add_argument("--without-torch", action="store_true", help="measure our sides alone")
    parser.reporting()
    parser.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help="draw the results there (default benchmarks/plots; quick: nowhere)",
    )
    given = parser.parse_args(arguments)
    parts = parser.some_of("--parts", given.parts or ",".join(PARTS), PARTS)
    for name, least in (
        ("rounds", 1),
        ("document", 1),
        ("problems", 2),
        ("samples", 2),
        ("seed", 0),
    ):
        if (value := getattr(given, name)) is not None and value < least:
            parser.error(f"--{name} is {value}, but it must be at least {least}")
    if not given.max_copies_gib > 0:
        parser.error(f"--max-copies-gib is {given.max_copies_gib}, but it must be more than 0")
    parser.check_output(given.output)
    folder = given.plots or (None if given.quick else PLOTS)
    parser.check_folder("--plots", folder)
    if folder and not plots.available():
        parser.error(
            "plots need matplotlib: install jaxshare[plot], or measure with --quick, which draws "
            "none"
        )
    if given.without_torch and given.torch_python:
        parser.error("--torch-python and --without-torch are both given; give one of them")
    scale = QUICK if given.quick else FULL
    asked = {
        name: value
        for name in ("document", "problems", "samples")
        if (value := getattr(given, name)) is not None
    }
    if given.rounds is not None:
        asked |= {"rounds": given.rounds, "runs": given.rounds}
    text, left_out = _text(parser, given.text, given.parts) if "needles" in parts else None, {}
    if "needles" in parts and text is None:
        parts = tuple(part for part in parts if part != "needles")
        left_out["needles"] = (
            f"there is no {DEFAULT_TEXT} in $JAXSHARE_DATA or ../shared/data; name any long text "
            "with --text"
        )
    python = None
    if TORCH_PARTS & set(parts) and not given.without_torch:
        python = other_python(parser, given.torch_python)
    return Options(
        parts,
        dataclasses.replace(scale, **asked),
        given.quick,
        given.heads,
        int(given.max_copies_gib * 2**30),
        given.seed,
        given.model,
        text,
        python,
        given.json,
        given.output,
        folder,
        left_out,
    )


def _text(parser: Parser, given: Path | None, parts: str | None) -> Path | None:
    """The file that needles are hidden in; ends the program if it is missing and was named,
    or if needles were named."""
    text = given or data_file(DEFAULT_TEXT)
    if text.is_file():
        return text
    if given is not None or parts is not None:
        parser.error(
            f"there is no {text.name} to hide needles in: name any long text with --text, or leave "
            "out the part needles"
            if given is None
            else f"--text is {given}, but there is no such file"
        )
    return None
