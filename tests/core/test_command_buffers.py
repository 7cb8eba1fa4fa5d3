"""Options with which a GPU's loops become graphs: given on a GPU alone, and never what XLA refuses.

What the compiled program then is, `make gpu-compile` looks at.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxshare import command_buffers
from jaxshare.decoding import loop
from jaxshare.pallas.device import H200, assume_device
from tests.helpers import run, tiny_state


class Gpu:
    """Stands for a device that is one."""

    platform, device_kind, compute_capability, core_count = "gpu", "NVIDIA H200", "9.0", 132


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(command_buffers, "default_device", Gpu)
    with assume_device(H200):
        yield


def test_a_cpu_gets_no_options(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert command_buffers.graph_options() == {}
    with assume_device(H200):  # kernels are interpreted, or lowered for elsewhere
        assert command_buffers.graph_options() == {}


def test_a_gpu_gets_those_that_this_xla_knows(on_a_gpu):
    options = command_buffers.graph_options()
    assert options["xla_gpu_enable_command_buffer"].split(",")[-2:] == ["CONDITIONAL", "WHILE"]
    # The XLA that is installed compiles with them, and they reach it.
    jax.jit(jnp.negative).lower(1.0).compile(compiler_options=options)
    with pytest.raises(jax.errors.JaxRuntimeError, match="command_buffer"):
        jax.jit(jnp.negative).lower(1.0).compile(compiler_options={next(iter(options)): "NONE"})


def test_xla_flags_of_the_user_stay(on_a_gpu, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION --xla_dump_to=/tmp/x")
    assert command_buffers.graph_options() == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x")
    assert command_buffers.graph_options()


@pytest.mark.parametrize(
    "option", [("xla_gpu_no_such_option", "1"), (command_buffers.NAME, "NONE")]
)
def test_what_xla_does_not_know_is_left_out(on_a_gpu, monkeypatch, option):
    monkeypatch.setattr(command_buffers, "LOOPS_IN_GRAPHS", dict([option]))
    assert command_buffers.graph_options() == {}


@pytest.mark.slow
def test_the_dispatch_is_compiled_with_them_but_not_inside_another_program(monkeypatch):
    """JAX refuses options of a jitted function inside another one."""
    given = []

    def options():
        given.append(1)
        return command_buffers.LOOPS_IN_GRAPHS

    prompts = [[1, 2, 3], [4], [5], [6, 7]]
    expected = run(tiny_state(prompts), 3).outputs()
    assert any(expected)
    monkeypatch.setattr(loop, "graph_options", options)
    assert run(tiny_state(prompts), 3).outputs() == expected and given == [1]
    assert jax.jit(lambda state: run(state, 3))(tiny_state(prompts)).outputs() == expected
    assert given == [1]
