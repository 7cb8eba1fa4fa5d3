"""Calls of Python functions from compiled programs on a CPU."""

import logging

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare.cpu.host_call import cpu_host_call

CALLS: list[tuple] = []


def halve(numbers, flags, scalar, words, doubled, count, back):
    CALLS.append((numbers.copy(), flags.copy(), int(scalar), words.copy()))
    doubled[:] = numbers / 2
    count[...] = flags.sum() + scalar
    back[:] = words


def fail(numbers, same):
    del numbers, same
    raise RuntimeError("not today")


def test_arrays_of_every_kind_and_shape_go_both_ways():
    CALLS.clear()

    @jax.jit
    def run(numbers, flags, scalar, words):
        shapes = (
            jax.ShapeDtypeStruct(numbers.shape, jnp.float32),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct(words.shape, jnp.uint32),
        )
        return cpu_host_call(halve, shapes, numbers, flags, scalar, words)

    rng = np.random.default_rng(0)
    for rows, width in ((3, 5), (1, 1), (0, 4), (70, 300)):
        numbers = rng.normal(size=(rows, width)).astype(np.float32)
        flags = rng.random(rows) < 0.5
        words = rng.integers(0, 2**32, (2, rows), dtype=np.uint32)
        half, count, back = run(numbers, flags, jnp.int32(7), words)
        np.testing.assert_array_equal(half, numbers / 2)
        np.testing.assert_array_equal(back, words)
        assert int(count) == flags.sum() + 7
        seen = CALLS.pop()
        np.testing.assert_array_equal(seen[0], numbers)
        np.testing.assert_array_equal(seen[1], flags)
        assert CALLS == []


def test_it_is_called_in_each_turn_of_a_loop_though_nothing_uses_the_result():
    CALLS.clear()

    @jax.jit
    def run(numbers):
        def turn(i, total):
            shapes = (
                jax.ShapeDtypeStruct((2,), jnp.float32),
                jax.ShapeDtypeStruct((), jnp.int32),
                jax.ShapeDtypeStruct((1, 1), jnp.uint32),
            )
            flags, words = jnp.ones(1, bool), jnp.ones((1, 1), jnp.uint32)
            _, count, _ = cpu_host_call(halve, shapes, numbers + total, flags, i, words)
            return total + count.astype(jnp.float32)

        return jax.lax.fori_loop(0, 4, turn, jnp.float32(0))

    assert float(run(jnp.zeros(2))) == sum(1 + i for i in range(4))
    assert [call[2] for call in CALLS] == [0, 1, 2, 3]
    assert [float(call[0][0]) for call in CALLS] == [0, 1, 3, 6]


def test_an_exception_is_logged_and_the_program_goes_on(caplog):
    @jax.jit
    def run(numbers):
        shape = jax.ShapeDtypeStruct(numbers.shape, jnp.float32)
        (same,) = cpu_host_call(fail, (shape,), numbers)
        return same * 0 + numbers

    with caplog.at_level(logging.ERROR, "jaxshare.cpu"):
        assert run(jnp.ones(3)).shape == (3,)
    assert "a call from a program has failed" in caplog.text and "not today" in caplog.text


def test_other_dtypes_are_an_error_in_the_log_and_not_wrong_numbers(caplog):
    @jax.jit
    def run(numbers):
        shape = jax.ShapeDtypeStruct(numbers.shape, jnp.float32)
        return cpu_host_call(fail, (shape,), numbers.astype(jnp.int8))[0]

    with caplog.at_level(logging.ERROR, "jaxshare.cpu"):
        jax.block_until_ready(run(jnp.ones(3)))
    assert "KeyError" in caplog.text
