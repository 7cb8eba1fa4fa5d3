"""Decodes a batch of prompts on many devices: the short program to copy from.

    python -m scripts.gpu.run_multi_gpu --tensor 4 --kv 2                       # one model over eight GPUs
    python -m scripts.gpu.run_multi_gpu --data 2 --tensor 4                     # two groups of rows, four GPUs each, one dispatch
    python -m scripts.gpu.run_multi_gpu --data 8 --pmap                         # eight whole models, by jax.pmap
    JAX_NUM_CPU_DEVICES=8 python -m scripts.gpu.run_multi_gpu --data 2 --tensor 2 --kv 2    # the same on a CPU

The rows of a group see one shared prompt, which is stored and read once for all of them, and each
decodes in a block of its own. With --pmap the model is whole on every device, so that nothing is
sent between them; JAX writes shard_map for new programs.
"""

import argparse
import sys
import time

import jax
import jax.numpy as jnp

from jaxshare import DecodeState, KVCache, Layout, Sampler, decode
from jaxshare.data_parallel import decode_groups, stack, unstack
from jaxshare.models import EMBEDDED, LoadedModel, load
from jaxshare.seeds import stream_seed
from jaxshare.serving.inputs import cache_dtype
from jaxshare.sharding import make_mesh


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        default=str(EMBEDDED),
        help="folder, GGUF file or hub id (default: the model that comes with jaxshare)",
    )
    parser.add_argument("--data", type=int, default=1, help="groups of rows (default 1)")
    parser.add_argument(
        "--tensor",
        type=int,
        default=1,
        help="devices that heads, MLP and vocabulary are split over (default 1)",
    )
    parser.add_argument(
        "--expert", type=int, default=1, help="devices that experts are split over (default 1)"
    )
    parser.add_argument(
        "--kv",
        type=int,
        default=1,
        help="devices that the tokens of a cache are split over (default 1)",
    )
    parser.add_argument(
        "--pmap", action="store_true", help="run the groups by jax.pmap, each on one device"
    )
    parser.add_argument(
        "--prompt", default="Compute 17 + 25 and 6 * 7.", help="what all rows begin with"
    )
    parser.add_argument("--rows", type=int, default=4, help="rows of a group (default 4)")
    parser.add_argument(
        "--tokens", type=int, default=64, help="tokens that each row samples at most (default 64)"
    )
    options = parser.parse_args()
    if options.pmap and options.tensor * options.expert * options.kv > 1:
        parser.error("--pmap runs whole models: leave out --tensor, --expert and --kv")
    if options.data < 1:
        parser.error(f"--data is {options.data}; it must be at least 1")
    if options.pmap and options.data > (found := len(jax.devices())):
        parser.error(
            f"--data {options.data} with --pmap needs {options.data} devices, but there "
            f"{'is 1' if found == 1 else f'are {found}'} ({jax.default_backend()}): give --data "
            f"{found}, or run where there are more (a CPU shows as n devices with "
            "JAX_NUM_CPU_DEVICES=n)"
        )
    return options


def main() -> int:
    options = parse()
    if options.pmap:
        model = load(options.model)
        states = [begin(model, options, group) for group in range(options.data)]
        state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        run = jax.pmap(
            lambda params, state: decode(model.module, params, state, passes=options.tokens),
            in_axes=(None, 0),
            devices=jax.devices()[: options.data],
        )
        clock = time.perf_counter()
        state = jax.block_until_ready(run(model.params, state))
        groups = [jax.tree.map(lambda leaf, g=g: leaf[g], state) for g in range(options.data)]
    else:
        sizes = {name: getattr(options, name) for name in ("data", "expert", "tensor", "kv")}
        mesh = make_mesh(**sizes)
        model = load(options.model, mesh=mesh)
        states = [begin(replica, options, group) for group, replica in enumerate(model.replicas())]
        clock = time.perf_counter()
        state = decode_groups(
            model.module, model.params, stack(states, mesh), passes=options.tokens
        )
        groups = unstack(jax.block_until_ready(state))
    seconds = time.perf_counter() - clock

    sampled = 0
    for g, group in enumerate(groups):
        for r, tokens in enumerate(group.outputs()):
            sampled += len(tokens)
            text = model.tokenizer.decode(tokens) if model.tokenizer else tokens
            print(f"group {g}, row {r}: {text!r}")
    print(f"{sampled} tokens in {seconds:.2f} s, compilation included", file=sys.stderr)
    return 0


def begin(model: LoadedModel, options: argparse.Namespace, group: int) -> DecodeState:
    """The prompt, fed to block 0, and rows that each see it and write to a block of their own."""
    prompt = model.tokenizer.encode(options.prompt) if model.tokenizer else [1, 2, 3]
    cache = KVCache.create(
        model.config,
        (len(prompt), *[options.tokens + 1] * options.rows),
        cache_dtype(model),
        mesh=model.mesh,
    )
    logits, cache = model.forward([prompt], [len(prompt)], cache, Layout.from_blocks([[0]]))
    return DecodeState.create(
        cache,
        Layout.from_blocks([[0, 1 + row] for row in range(options.rows)]),
        [[]] * options.rows,
        vocab_size=model.config.vocab_size,
        samplers=Sampler(temperature=0.7),
        seeds=[stream_seed(0, group, row) for row in range(options.rows)],
        max_new_tokens=options.tokens,
        stops=model.generation.stop_tokens,
        logits=logits[0],
        max_width=1,
    )


if __name__ == "__main__":
    sys.exit(main())
