"""The command `jaxshare generate`: completions of one prompt, or a dialogue from stdin."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from jaxshare import progress
from jaxshare.decoding.logprobs import RAW
from jaxshare.serving.branches.generate import Completions
from jaxshare.serving.branches.generate import generate as generate_completions
from jaxshare.serving.branches.prompt_tree import MAX_COMPLETIONS
from jaxshare.serving.cli import arguments
from jaxshare.serving.cluster import process_mesh
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.inputs import default_sampler, encode_messages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare generate`."""
    arguments.add_model(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        help="without --chat, special tokens such as <|im_end|> in it are special",
    )
    prompt.add_argument("--prompt-file", metavar="FILE", help="`-` reads stdin")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message, put into the model's chat template; without "
        "a prompt, every line of stdin is one, and answers are remembered",
    )
    parser.add_argument("--n", type=int, default=1, help="number of completions (default 1)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, help="maximum tokens of a completion (default 64)"
    )
    arguments.add_sampling(parser)
    arguments.add_chat_template(parser)
    arguments.add_stops(parser)
    arguments.add_grammar(parser)
    arguments.add_logprobs(parser, "with --json")
    process_mesh.add_arguments(parser)
    process_mesh.add_process_arguments(parser)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of all completions; no two of them, nor of two seeds, share random numbers "
        "(default 0)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object on stdout; with --chat and no prompt, one per line",
    )


@process_mesh.together
def run(options: argparse.Namespace) -> int:
    """Runs `jaxshare generate`.

    Raises:
      ValueError: wrong settings, no prompt, or a model without the chat template that --chat needs.
      FileNotFoundError: no such model.
    """
    # Errors that do not depend on the model are raised before it is loaded.
    sampling = arguments.sampling_of(options)
    arguments.check_logprobs(options)
    if not 1 <= options.n <= MAX_COMPLETIONS:
        raise ValueError(
            f"--n is {options.n}; ask for at least 1 completion and at most {MAX_COMPLETIONS}"
        )
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {options.max_new_tokens}; ask for at least 1 token")
    text = (
        None
        if options.chat and options.prompt is None and options.prompt_file is None
        else arguments.read_text("prompt", options.prompt, options.prompt_file, " or --chat")
    )
    if text is None and process_mesh.is_together(options):
        raise ValueError(
            "a dialogue from stdin runs in one process; give --prompt to run it on several"
        )
    mesh = process_mesh.mesh_of(options)

    model: Any = arguments.load_model(options, mesh)
    arguments.need_tokenizer(model, options.model)
    if options.chat and not model.tokenizer.chat_template:
        raise ValueError(
            f"{options.model} has no chat template; leave out --chat and write the prompt as the "
            "model expects it"
        )
    if options.chat:
        _chat(options, model, sampling, text)
    else:
        _complete(options, model, sampling, text or "")
    return 0


def _chat(
    options: argparse.Namespace, model: Any, sampling: dict[str, Any], text: str | None
) -> None:
    """Answers one message, or each line of stdin as a turn of one dialogue."""
    messages: list[dict[str, str]] = []
    for message in [text] if text is not None else map(str.strip, sys.stdin):
        if not message:
            continue
        messages.append({"role": "user", "content": message})
        prompt = encode_messages(model, messages)
        answer = _complete(options, model, sampling, prompt, first=len(messages) == 1)
        messages.append({"role": "assistant", "content": answer})


def _complete(
    options: argparse.Namespace,
    model: Any,
    sampling: dict[str, Any],
    prompt: str | list[int],
    first: bool = True,
) -> str:
    """Samples and prints completions; returns the text of the first one.

    The notes on what was chosen for the run are printed with the first prompt alone.
    """
    sampler = dataclasses.replace(default_sampler(model), **sampling)
    pending_notes = first
    with progress.work("prefill") as work:

        def show(branches: Any) -> None:
            nonlocal pending_notes
            if pending_notes and process_mesh.speaks():
                for note in branches.notes:
                    progress.DISPLAY.say(f"jaxshare: {note}")
            pending_notes = False
            if branches.sampled_tokens:
                work.turn_to("decoding", options.n * options.max_new_tokens, "tokens")
                work.done = branches.sampled_tokens

        result = generate_completions(
            model,
            prompt,
            n=options.n,
            max_new_tokens=options.max_new_tokens,
            sampler=sampler,
            stop=options.stop,
            include_stop=options.include_stop,
            top_logprobs=options.top_logprobs,
            logprobs=options.logprobs or RAW,
            seed=options.seed,
            on_tokens=show,
            alone=options.alone,
        )
    if options.json:
        print(json.dumps(_as_json(result)), flush=True)
    else:
        _print_texts(result, options.n)
    return result.completions[0].text


def _as_json(result: Completions) -> dict[str, Any]:
    return {
        "completions": [_completion_as_json(c) for c in result.completions],
        "prompt_tokens": result.prompt_tokens,
        "passes": result.passes,
        "seconds": result.seconds,
        "compile_seconds": result.compile_seconds,
        "tokens_per_second": result.tokens_per_second,
        "kv_bytes": result.kv_bytes,
        "rows": result.rows,
        "costs": result.costs and dataclasses.asdict(result.costs),
    }


def _completion_as_json(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": str(completion.finish_reason),
        "logprob": completion.logprob,
        "logprobs": completion.logprobs,
        **({"top_logprobs": completion.top_logprobs} if completion.top_logprobs else {}),
        "prompt": completion.prompt,
        "index": completion.index,
    }


def _print_texts(result: Completions, n: int) -> None:
    for i, completion in enumerate(result.completions):
        if n > 1:
            print(
                f"{'' if i == 0 else chr(10)}--- {i + 1} of {n} ({completion.finish_reason}, "
                f"logprob {completion.logprob:.2f})"
            )
        print(completion.text, flush=True)
