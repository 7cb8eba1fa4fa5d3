"""The `jaxshare` command."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxshare.sampling import Sampler


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Errors of the user's making are one sentence on stderr and exit code 1."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        print(f"jaxshare: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxshare: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxshare", description="Inference for groups of language-model streams that share memory.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="one model as two workers and as sixteen branches over one shared cache")
    demo.add_argument("--model", metavar="PATH", help="folder or hub id of a chat model; default the one that comes with jaxshare")
    demo.add_argument("--seed", type=int, default=0, help="of the problem and the samples (default 0)")
    demo.add_argument("--json", action="store_true", help="one JSON object on stdout, everything else on stderr")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="sample completions of a prompt, which is stored and read once for all of them")
    generate.add_argument("model", metavar="MODEL", help="folder or hub id, or `embedded` for the model that comes with jaxshare")
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE", help="`-` reads stdin")
    generate.add_argument("--chat", action="store_true", help="the prompt is a user's message, put into the model's chat template; without "
                          "a prompt, every line of stdin is one, and answers are remembered")
    generate.add_argument("--n", type=int, default=1, help="completions (default 1)")
    generate.add_argument("--max-new-tokens", type=int, default=64, help="most tokens of a completion (default 64)")
    generate.add_argument("--temperature", type=float, help="0 takes the likeliest token (default: the checkpoint's own)")
    generate.add_argument("--top-k", type=int, help="keep the k likeliest tokens; 0 keeps all (default: the checkpoint's own)")
    generate.add_argument("--top-p", type=float, help="keep the likeliest tokens of this probability (default: the checkpoint's own)")
    generate.add_argument("--min-p", type=float, help="keep tokens this likely, as a part of the likeliest (default: the checkpoint's)")
    generate.add_argument("--seed", type=int, default=0, help="of the first completion; number i has seed + i (default 0)")
    generate.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's own)")
    generate.add_argument("--json", action="store_true", help="one JSON object on stdout; with --chat and no prompt, one a line")
    generate.set_defaults(run=_generate)
    return parser


def _demo(options: argparse.Namespace) -> int:
    from jaxshare import models  # here, so that --help and wrong arguments answer at once
    from jaxshare.serving import demo

    model = models.load(options.model) if options.model else demo.load_embedded()
    result = demo.run_demo(model, options.seed, demo.console_for(options.json))
    if options.json:
        print(json.dumps(result))
    return 0


def _generate(options: argparse.Namespace) -> int:
    # What can be wrong without the model is found before it is loaded.
    given = {name: value for name in ("temperature", "top_k", "top_p", "min_p") if (value := getattr(options, name)) is not None}
    Sampler(**given)
    if options.n < 1:
        raise ValueError(f"--n is {options.n}; ask for at least 1 completion")
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {options.max_new_tokens}; ask for at least 1 token")
    text = _prompt(options)

    from jaxshare import models

    model: Any = models.load(models.EMBEDDED if options.model == "embedded" else options.model, dtype=options.dtype)
    if options.chat and (model.tokenizer is None or not model.tokenizer.chat_template):
        raise ValueError(f"{options.model} has no chat template; leave out --chat and write the prompt as the model wants it")
    if text is not None and not options.chat:
        _answer(options, model, given, text)
        return 0
    messages: list[dict[str, str]] = []
    for message in [text] if text is not None else map(str.strip, sys.stdin):
        if not message:
            continue
        messages.append({"role": "user", "content": message})
        # As tokens, because the template has the special tokens in it already.
        tokens = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False,
                                                     tokenizer_kwargs={"verbose": False})
        messages.append({"role": "assistant", "content": _answer(options, model, given, tokens)})
    return 0


def _prompt(options: argparse.Namespace) -> str | None:
    if options.prompt is not None:
        text = options.prompt
    elif options.prompt_file is not None:
        try:
            text = sys.stdin.read() if options.prompt_file == "-" else Path(options.prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the prompt file {options.prompt_file} cannot be read ({error}); give a file of UTF-8 text") from error
    elif options.chat:
        return None
    else:
        raise ValueError("there is no prompt; give --prompt TEXT, --prompt-file FILE or --chat")
    if not text.strip():
        raise ValueError("the prompt is empty; give at least one word")
    return text


def _answer(options: argparse.Namespace, model: Any, given: dict, prompt: str | list[int]) -> str:
    """Generates and prints; the first completion's text."""
    import dataclasses

    from tqdm import tqdm

    from jaxshare.serving.branches import default_sampler, generate

    sampler = dataclasses.replace(default_sampler(model), **given)
    with tqdm(total=options.n * options.max_new_tokens, unit=" tokens", leave=False, disable=not sys.stderr.isatty()) as bar:
        def show(state) -> None:
            bar.n = int(state.drawn.sum())
            bar.refresh()

        done = generate(model, prompt, n=options.n, max_new_tokens=options.max_new_tokens, sampler=sampler, seed=options.seed,
                        on_tokens=show)
    if options.json:
        print(json.dumps({"completions": [dataclasses.asdict(c) for c in done.completions], "prompt_tokens": done.prompt_tokens,
                          "passes": done.passes, "seconds": done.seconds, "tokens_per_second": done.tokens_per_second,
                          "kv_bytes": done.kv_bytes}), flush=True)
    else:
        for i, completion in enumerate(done.completions):
            if options.n > 1:
                print(f"{'' if i == 0 else chr(10)}--- {i + 1} of {options.n} ({completion.reason}, logprob {completion.logprob:.2f})")
            print(completion.text, flush=True)
    return done.completions[0].text


if __name__ == "__main__":
    sys.exit(main())
