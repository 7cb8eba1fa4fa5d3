"""Arenas of few sizes, so that tests share programs.

A program of the decode loop or of a pass over a prompt is compiled for the size of the arena, which
takes seconds. `make test` makes the arenas of pools larger than a test asks for; what a pool may take
of its arena is what the test asks for, and the places behind are never written. In `make test-all`
every arena has its own size.
"""

SIZES = 8192, 16384
"""Tokens of arenas; larger ones have the size that is asked for."""


def share_sizes() -> None:
    """Gives all pools that are made from now on arenas of these sizes."""
    from jaxshare.serving.kvcache import pool

    exact = pool.empty_arena
    pool.empty_arena = lambda model, tokens: exact(
        model, next((size for size in SIZES if tokens <= size), tokens)
    )
