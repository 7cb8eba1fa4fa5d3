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
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxshare.models import EMBEDDED, LoadedModel, ModelConfig, load
from jaxshare.serving.kvcache import sharing_cost
from jaxshare.serving.tuning import calibration
from scripts.bench.lib import Goal, finish, machine, own_command, versions, write_checkpoint
from scripts.bench.parts.sharing import attention, plots
from scripts.bench.parts.sharing import decode as decoding
from scripts.bench.parts.sharing import generate as generating
from scripts.bench.parts.sharing.needles import Needles, UnfitError, hide
from scripts.bench.parts.sharing.options import (
    MODEL,
    PAPER_HEADS,
    QUICK_LAYERS,
    TEXT_MODEL,
    Options,
    parse,
)
from scripts.bench.parts.sharing.report import as_text, goals, needle_goals
from scripts.bench.peer import WAITING, Worker, WorkerError, fastest

QUESTION_ROOM = 128
"""Tokens that a question and its answer have at most."""
WORKER = "scripts.bench.peers.torch_sharing"


def _unmeasured(options: "Options") -> list[Goal]:
    """The goals of parts that were left out."""
    return (
        needle_goals(options.scale.questions, None, bool(options.scale.documents), None)
        if "needles" in options.left_out
        else []
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    for part, why in options.left_out.items():
        print(f"scripts.bench.sharing: the part {part} is left out: {why}", file=sys.stderr)
    asked = own_command(__file__, arguments)
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
    """The settings of a run, and the results, by part."""
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
            results["needles"] = _measure_needles(options, *needles, say)
        if "levels" in options.parts:
            results["levels"] = _measure_levels(options, part_model, say)
        if "rule" in options.parts:
            results["rule"] = _measure_rule(options, part_model, say)
    return settings_of(options, parameters, part_model.config.num_layers, torch), results


def settings_of(
    options: Options, parameters: int, layers_of_last_parts: int, torch: str | None
) -> dict[str, Any]:
    """The settings of a report."""
    return {
        "parameters": parameters,
        "dtype": "bfloat16",
        "parts": options.parts,
        "left_out": options.left_out,
        "quick": options.quick,
        "seed": options.seed,
        "heads": options.heads,
        "max_copies_bytes": options.most_bytes,
        "rounds": options.scale.rounds,
        "scale": dataclasses.asdict(options.scale),
        "layers_of_last_parts": layers_of_last_parts,
        "suffix": decoding.SUFFIX,
        "answer_tokens": generating.ANSWER_TOKENS,
        "torch": torch,
        "model": MODEL,
        "text_model": Path(options.model).name if options.model else TEXT_MODEL,
    }


def _measure_needles(
    options: Options,
    model: LoadedModel,
    document: Needles,
    others: dict[int, Needles],
    say: attention.Say,
) -> dict[str, Any]:
    scale = options.scale
    found = generating.measure_needles(
        model,
        document,
        scale.questions,
        scale.most_rows,
        scale.runs,
        options.most_bytes,
        scale.other_sides,
        say,
    )
    if others:
        found["documents"] = generating.measure_documents(
            model, others, _middle(scale.questions), scale.runs, say
        )
    return found


def _measure_levels(options: Options, model: LoadedModel, say: attention.Say) -> dict[str, Any]:
    scale = options.scale
    return generating.measure_levels(
        model,
        scale.few_shot,
        scale.problem,
        scale.problems,
        scale.samples,
        scale.new_tokens,
        scale.batch,
        scale.equal_batch,
        scale.runs,
        options.seed,
        say,
    )


def _measure_rule(options: Options, model: LoadedModel, say: attention.Say) -> list[dict[str, Any]]:
    scale, rules = options.scale, {"default": sharing_cost.DEFAULT}
    if not options.quick:
        say("cost rule: calibrate")
        rules["calibrated"] = calibration.calibrate(model)[0]
    return decoding.measure_rule(
        model,
        scale.rule_rows,
        scale.rule_prefixes,
        scale.steps,
        scale.rounds,
        options.most_bytes,
        rules,
        options.seed,
        say,
    )


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
    """The model that answers questions: the named one, or random weights with the embedded model's
    tokenizer."""
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
