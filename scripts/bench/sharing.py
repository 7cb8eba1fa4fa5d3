"""Sharing of prefixes: attention, decoding, questions about one document, two levels, and the rule
that chooses, against not sharing.

    python -m scripts.bench.sharing                               # the full measurement
    python -m scripts.bench.sharing --quick                       # a part of it within three minutes on two cores
    python -m scripts.bench.sharing --parts attention,rule        # some of its parts
    python -m scripts.bench.sharing --json --output FILE          # one JSON object

The measurements are those of Hydragen, section 4, scaled to this machine. transformers and PyTorch
run under a Python of their own (--torch-python); with --without-torch the goals that are set
against them count as not measured. How to read the result is in benchmarks/README.md.
"""

import contextlib
import dataclasses
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxshare.models import EMBEDDED, LoadedModel, ModelConfig, load
from jaxshare.serving.kvcache import sharing_cost
from jaxshare.serving.tuning import calibration
from scripts.bench import decode as bench_decode
from scripts.bench.lib import (
    ROOT,
    TORCH_PYTHON,
    WAITING,
    Goal,
    Parser,
    Worker,
    WorkerError,
    command,
    fastest,
    finish,
    machine,
    table,
    torch_python,
    versions,
    write_checkpoint,
)
from scripts.bench.parts import sharing_attention as attention
from scripts.bench.parts import sharing_decode as decoding
from scripts.bench.parts import sharing_generate as generating
from scripts.bench.parts import sharing_plots as plots
from scripts.bench.parts.sharing_attention import NO_ATTENTION, SDPA, SHARED, THEIRS, UNSHARED
from scripts.bench.parts.sharing_needles import Needles, UnfitError, hide

MODEL = bench_decode.MODEL | {
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
"""With --quick the last three parts run so many layers, because compiling more would take most of
the time."""
QUESTION_ROOM = 128
"""Tokens that a question and its answer have at most."""
PARTS = ("attention", "end-to-end", "needles", "levels", "rule")
TORCH_PARTS = {"attention", "end-to-end"}
WORKER = "scripts.bench.peers.torch_sharing"
DEFAULT_TEXT = "war_and_peace.txt"
PLOTS = ROOT / "benchmarks" / "plots"

ATTENTION_POINT = {"rows": 64, "prefix": 4096, "suffix": 64}
ATTENTION_GOALS = {UNSHARED: 8.0, SDPA: 10.0}
PRODUCTS_GOAL = 0.55
END_POINT = {"batch": 64, "prefix": 4096}
END_GOALS = {UNSHARED: 3.0, THEIRS: 15.0}
PREDICTION_GOAL = 1.25
NEEDLES_GOAL = 1.1
"""Times in proportion to the number of questions."""
DOCUMENT_GOAL = 1.6
LEVELS_GOAL = 1.5
RULE_GOAL = 1.03


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured; lengths in tokens.

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
    steps=2,
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
    rounds=3,
    runs=1,
)
"""Compiling takes most of the time, so it has few programs rather than short turns."""


def goals(results: Mapping[str, Any], heads: str, unmeasured: Sequence[Goal] = ()) -> list[Goal]:
    """The goals that these results can be held against; those set against PyTorch also where it did
    not run, and those `unmeasured`."""
    found = []

    def times(name: str, of: Mapping[str, Mapping[str, float]], side: str, goal: float) -> None:
        found.append(Goal(name, of[side]["median"] if side in of else None, goal))

    for r in results.get("attention", []):
        if heads == "model" and ATTENTION_POINT.items() <= r.items():
            what = "attention, 64 rows, prefix 4096, suffix 64"
            for side, goal in ATTENTION_GOALS.items():
                times(f"{what}: times faster than {side}", r["slower_than_shared"], side, goal)
            found.append(
                Goal(
                    f"{what}: of the rate of large products",
                    r["sides"][SHARED]["of_products"],
                    PRODUCTS_GOAL,
                )
            )
    for r in results.get("end-to-end", []):
        if END_POINT.items() <= r.items():
            what = "decoding, batch 64, prefix 4096"
            for side, goal in END_GOALS.items():
                times(f"{what}: times faster than {side}", r["slower_than_shared"], side, goal)
            found.append(
                Goal(
                    f"{what}: a step, times the prediction",
                    r["shared_to_predicted"]["median"],
                    PREDICTION_GOAL,
                    at_most=True,
                )
            )
    if "needles" in results:
        r = results["needles"]
        documents = r.get("documents")
        found += needle_goals(
            r["questions"],
            r["last_to_first"],
            bool(documents),
            documents["longest_to_shortest"]["median"] if documents else None,
        )
    if "levels" in results:
        best = max(results["levels"]["one_level_to"].values(), key=lambda ratio: ratio["median"])
        found.append(
            Goal(
                "two levels, memory of one: times faster than one level",
                best["median"],
                LEVELS_GOAL,
            )
        )
    if results.get("rule"):
        found += [
            Goal(
                f"cost rule, {rule} costs: the choice to the better of the two, worst",
                worst,
                RULE_GOAL,
                at_most=True,
            )
            for rule, worst in worst_choices(results["rule"]).items()
        ]
    return [*found, *unmeasured]


def needle_goals(
    questions: Sequence[int],
    last_to_first: float | None,
    with_documents: bool,
    longer: float | None,
) -> list[Goal]:
    """The goals of the part needles, for these numbers of questions; what was not measured is
    None."""
    found, first, last = [], questions[0], questions[-1]
    if (first, last) == (16, 256):
        found.append(
            Goal(
                f"needles: seconds of {last} questions, times those of {first}",
                last_to_first,
                last / first * NEEDLES_GOAL,
                at_most=True,
            )
        )
    if with_documents:
        found.append(
            Goal(
                "needles: seconds with a document twice as long, times",
                longer,
                DOCUMENT_GOAL,
                at_most=True,
            )
        )
    return found


def _unmeasured(options: "Options") -> list[Goal]:
    """The goals of parts that were left out."""
    return (
        needle_goals(options.scale.questions, None, bool(options.scale.documents), None)
        if "needles" in options.left_out
        else []
    )


def worst_choices(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """For each rule the worst of its choices over all points."""
    return {
        rule: max(point["chosen_to_better"][rule] for point in points)
        for rule in points[0]["chosen"]
    }


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    settings, where, found, results = (
        report["settings"],
        report["machine"],
        report["versions"],
        report["results"],
    )
    torch = found.get("torch")
    lines = [
        f"Llama, {settings['parameters'] / 1e6:.1f} M parameters, bfloat16; medians of "
        f"{settings['rounds']} rounds",
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; jax "
        f"{found['jaxshare']['jax']}; "
        + (
            f"transformers {torch['transformers']} on torch {torch['torch']}"
            if torch
            else "without PyTorch"
        ),
    ]
    texts = {
        "attention": _attention_text,
        "end-to-end": _end_text,
        "needles": _needles_text,
        "levels": _levels_text,
        "rule": _rule_text,
    }
    return "\n\n".join(
        [
            "\n".join(lines),
            *(text(results[part]) for part, text in texts.items() if part in results),
        ]
    )


def _attention_text(points: Sequence[Mapping[str, Any]]) -> str:
    names = (SHARED, UNSHARED, SDPA)
    rows = []
    for r in points:
        sides = [r["sides"].get(name) for name in names]
        rows.append(
            (
                f"{r['rows']} rows, {r['prefix']} + {r['suffix']}",
                *(f"{s['milliseconds']:.2f}" if s else "-" for s in sides),
                f"{sides[0]['gflops']:.0f}",
                f"{r['product_gflops']:.0f}",
                f"{sides[0]['of_products']:.2f}",
                *(
                    f"{ratio['median']:.1f}"
                    if (ratio := r["slower_than_shared"].get(name))
                    else "-"
                    for name in names[1:]
                ),
            )
        )
    header = (
        "attention, one layer",
        *(f"{name} ms" for name in names),
        "GFLOP/s",
        "products",
        "of them",
        "unshared x",
        "SDPA x",
    )
    return table(header, rows)


def _end_text(points: Sequence[Mapping[str, Any]]) -> str:
    names = (SHARED, UNSHARED, NO_ATTENTION, THEIRS)
    rows = []
    for r in points:
        sides = [r["sides"].get(name) for name in names]
        rows.append(
            (
                f"batch {r['batch']}, prefix {r['prefix']}",
                *(f"{s['tokens_per_second']:.1f}" if s else "-" for s in sides),
                f"{sides[0]['step_milliseconds']:.1f}",
                f"{r['predicted_milliseconds']:.1f}",
                f"{r['shared_to_predicted']['median']:.2f}",
                *(
                    f"{r['slower_than_shared'][name]['median']:.1f}" if name in r["sides"] else "-"
                    for name in (UNSHARED, THEIRS)
                ),
            )
        )
    header = ("tokens/s", *names, "step ms", "predicted", "ratio", "unshared x", "transformers x")
    return table(header, rows)


def _needles_text(r: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{count} questions",
            *(
                f"{r['seconds'][name][str(count)]:.2f}"
                if str(count) in r["seconds"].get(name, {})
                else "-"
                for name in (SHARED, UNSHARED, NO_ATTENTION)
            ),
            f"{r['accuracy'][str(count)]:.2f}",
        )
        for count in r["questions"]
    ]
    lines = [
        table(
            (
                f"seconds, document {r['document_tokens']}",
                SHARED,
                UNSHARED,
                NO_ATTENTION,
                "accuracy",
            ),
            rows,
        ),
        *(
            f"{name}: {line['seconds_a_question']:.3f} s a question"
            for name, line in r["line"].items()
        ),
        f"the document itself: {r['prefill_seconds']:.2f} s",
    ]
    if documents := r.get("documents"):
        by_length = ", ".join(
            f"{length} tokens {seconds:.2f} s" for length, seconds in documents["seconds"].items()
        )
        lines.append(f"{documents['questions']} questions by the document's length: {by_length}")
    return "\n".join(lines)


def _levels_text(r: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            f"{side['seconds']:.2f}",
            str(side["rows"]),
            f"{side['kv_bytes'] / 2**20:.0f}",
            str(side["passes"]),
            f"{r['one_level_to'][name]['median']:.2f}" if name in r["one_level_to"] else "",
        )
        for name, side in r["sides"].items()
    ]
    lengths = f"{r['few_shot']} + {r['problem']} + {r['new_tokens']} tokens"
    return table(
        (
            f"{r['problems']} problems, {r['samples']} samples, {lengths}",
            "seconds",
            "rows",
            "KV MiB",
            "passes",
            "times",
        ),
        rows,
    )


def _rule_text(points: Sequence[Mapping[str, Any]]) -> str:
    if not points:
        return "the cost rule was not measured: no copies fit the memory allowed for them"
    rules = list(points[0]["chosen"])
    rows = [
        (
            f"{r['rows']} rows, prefix {r['prefix']}",
            *(f"{r['milliseconds'][name]:.2f}" for name in (SHARED, UNSHARED)),
            f"{r['worse_to_better']:.3f}",
            f"{r['better_to_itself']:.3f}",
            *(f"{r['chosen'][rule]} {r['chosen_to_better'][rule]:.3f}" for rule in rules),
        )
        for r in points
    ]
    noise = [abs(r["better_to_itself"] - 1) for r in points]
    lines = [
        table(
            (
                "ms a pass",
                SHARED,
                UNSHARED,
                "worse/better",
                "noise",
                *(f"by {rule} costs" for rule in rules),
            ),
            rows,
        )
    ]
    for rule, worst in worst_choices(points).items():
        middle = statistics.median(r["chosen_to_better"][rule] for r in points)
        lines.append(
            f"{rule} costs: the choice is at worst {worst:.3f} times as slow as the better of the "
            f"two, in the median {middle:.3f}"
        )
    lines.append(
        f"equal programs were measured up to {100 * max(noise):.1f} % apart, in the median "
        f"{100 * statistics.median(noise):.1f} %"
    )
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for; `torch_python` is None without PyTorch, `text` where no needles are
    hidden, `plots` where none are drawn. `left_out` are parts that cannot be measured here, and
    why."""

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
    parser = Parser(prog="scripts.bench.sharing", description=__doc__.splitlines()[0])
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
        "--rounds", type=int, help="turns of each side (default 5, of whole runs 3; quick 3 and 1)"
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
        python = torch_python(parser, given.torch_python)
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
    """The file that needles are hidden in; ends the program where there is none but one was named,
    or needles were asked for by name."""
    text = (
        given
        or Path(os.environ.get("JAXSHARE_DATA") or ROOT.parent / "shared" / "data") / DEFAULT_TEXT
    )
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


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    for part, why in options.left_out.items():
        print(f"scripts.bench.sharing: the part {part} is left out: {why}", file=sys.stderr)
    asked = command(
        [str(Path(__file__).resolve()), *(sys.argv[1:] if arguments is None else arguments)]
    )
    where, found = machine(), {"jaxshare": versions(("jax", "jaxlib", "flax", "numpy"))}
    with contextlib.ExitStack() as stack:
        workers = {}
        if options.torch_python:
            try:
                workers = {
                    name: stack.enter_context(Worker(options.torch_python, WORKER, env))
                    for name, env in WAITING.items()
                }
                found["torch"] = [worker.begin() for worker in workers.values()][-1]
            except WorkerError as error:
                print(
                    f"scripts.bench.sharing: {options.torch_python} cannot run transformers "
                    f"({error}): --torch-python takes a Python that has PyTorch and transformers, "
                    "such as the one that `make parity` makes in .venv-torch",
                    file=sys.stderr,
                )
                return 2
        try:
            settings, results = measure_all(options, workers)
        except WorkerError as error:
            print(f"scripts.bench.sharing: PyTorch could not go on: {error}", file=sys.stderr)
            return 1
        except UnfitError as error:
            print(f"scripts.bench.sharing: {error}", file=sys.stderr)
            return 2
    report = {
        "benchmark": "sharing",
        "command": asked,
        "machine": where,
        "versions": found,
        "settings": settings,
        "results": results,
    }
    finish(
        report,
        as_text(report),
        goals(results, options.heads, _unmeasured(options)),
        as_json=options.json,
        output=options.output,
    )
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
        plots.draw(results, options.plots)
    return 0


def measure_all(
    options: Options, workers: dict[str, Worker]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was measured with, and the results, by part."""
    scale, seed, most = options.scale, options.seed, options.most_bytes
    results: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(leave=False, file=sys.stderr, bar_format="{desc} [{elapsed}]") as bar,
    ):
        say = bar.set_description_str
        say("weights")
        # first, because what was named may not do
        needles = prepare_needles(options) if options.text else None
        parameters = write_checkpoint(Path(folder), MODEL, seed)
        model, worker, torch = load(folder), None, None
        part_model = decoding.first_layers(model, QUICK_LAYERS) if options.quick else model
        if workers:
            say("transformers: load")
            worker, torch = fastest(workers, folder)
        product = attention.Product()
        if "attention" in options.parts:
            config = ModelConfig.from_json(
                MODEL | (PAPER_HEADS if options.heads == "paper" else {})
            )
            results["attention"] = attention.measure(
                config, scale.attention, scale.rounds, most, worker, product, seed, say
            )
        if "end-to-end" in options.parts:
            results["end-to-end"] = decoding.measure(
                model,
                scale.batches,
                scale.prefixes,
                scale.steps,
                scale.their_steps,
                scale.rounds,
                most,
                worker,
                product,
                seed,
                say,
            )
        if worker:
            worker.close()  # its memory is free for what follows
        if needles:
            text_model, document, others = needles
            found = results["needles"] = generating.measure_needles(
                text_model,
                document,
                scale.questions,
                scale.most_rows,
                scale.runs,
                most,
                scale.other_sides,
                say,
            )
            if others:
                found["documents"] = generating.measure_documents(
                    text_model, others, _middle(scale.questions), scale.runs, say
                )
        if "levels" in options.parts:
            results["levels"] = generating.measure_levels(
                part_model,
                scale.few_shot,
                scale.problem,
                scale.problems,
                scale.samples,
                scale.new_tokens,
                scale.batch,
                scale.equal_batch,
                scale.runs,
                seed,
                say,
            )
        if "rule" in options.parts:
            rules = {"default": sharing_cost.DEFAULT}
            if not options.quick:
                say("cost rule: calibrate")
                rules["calibrated"] = calibration.calibrate(part_model, progress=list)[0]
            results["rule"] = decoding.measure_rule(
                part_model,
                scale.rule_rows,
                scale.rule_prefixes,
                scale.steps,
                scale.rounds,
                most,
                rules,
                seed,
                say,
            )
    settings = {
        "parameters": parameters,
        "dtype": "bfloat16",
        "parts": options.parts,
        "left_out": options.left_out,
        "quick": options.quick,
        "seed": seed,
        "heads": options.heads,
        "max_copies_bytes": most,
        "rounds": scale.rounds,
        "scale": dataclasses.asdict(scale),
        "layers_of_last_parts": part_model.config.num_layers,
        "suffix": decoding.SUFFIX,
        "answer_tokens": generating.ANSWER_TOKENS,
        "torch": torch,
        "model": MODEL,
        "text_model": Path(options.model).name if options.model else TEXT_MODEL,
    }
    return settings, results


def prepare_needles(options: Options) -> tuple[LoadedModel, Needles, dict[int, Needles]]:
    """The model that answers, the document, and those of different lengths that are held against
    each other.

    Raises:
      UnfitError: the model or the text that was named cannot be used.
    """
    scale, model = options.scale, _text_model(options)
    assert options.text is not None
    text = options.text.read_text(encoding="utf-8", errors="replace")

    def document(tokens: int, questions: int) -> Needles:
        return hide(
            text, tokens, questions, lambda text: generating.count_tokens(model, text), options.seed
        )

    return (
        model,
        document(scale.document, max(scale.questions)),
        {tokens: document(tokens, _middle(scale.questions)) for tokens in scale.documents},
    )


def _middle(numbers: Sequence[int]) -> int:
    return sorted(numbers)[len(numbers) // 2]


def _text_model(options: Options) -> LoadedModel:
    """The model that answers questions: the one that was named, or random weights behind the
    embedded model's tokenizer."""
    longest = max((options.scale.document, *options.scale.documents))
    if options.model:
        try:
            model = load(options.model)
        except (OSError, ValueError) as error:
            raise UnfitError(f"--model cannot be loaded: {error}") from error
        if model.tokenizer is None:
            raise UnfitError(
                f"--model is {Path(options.model).name}, but it has no tokenizer, and questions "
                "are text"
            )
        if model.config.max_positions < longest + QUESTION_ROOM:
            raise UnfitError(
                f"--model is {Path(options.model).name}, whose context of "
                f"{model.config.max_positions} tokens does not hold a document of {longest} and a "
                f"question of {QUESTION_ROOM}; ask for a shorter one with --document"
            )
        return model
    tokenizer = load(EMBEDDED).tokenizer
    assert tokenizer is not None
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), TEXT_MODEL | {"vocab_size": len(tokenizer)}, options.seed)
        model = dataclasses.replace(load(folder), tokenizer=tokenizer)
    return decoding.first_layers(model, QUICK_LAYERS) if options.quick else model


if __name__ == "__main__":
    sys.exit(main())
