"""Compiled programs are kept for later processes, where the user wants them and nowhere else."""

import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxshare import compile_cache, progress
from jaxshare.compile_time import reported_compiles

PROGRAM = """
import jax, jax.numpy as jnp
{decide}
hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3))).block_until_ready()
print(len(hits) > 0, jax.config.jax_compilation_cache_dir)
"""
VARIABLES = "JAX_COMPILATION_CACHE_DIR", "JAXSHARE_CACHE", "JAXSHARE_COMPILE_CACHE"
ENABLE = "from jaxshare import compile_cache; compile_cache.enable()"


def run(tmp_path, decide):
    """What a process finds: "True" where it has read a program, and the folder."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(decide=decide)],
        env=env | {"XDG_CACHE_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.split()


def test_loading_a_model_switches_it_on_and_the_next_process_reads_what_one_has_compiled(tmp_path):
    folder = tmp_path / "home" / "jaxshare" / "compiled"
    load = "from jaxshare.models import load; load('embedded')"
    assert run(tmp_path, load) == ["False", str(folder)]
    assert any(folder.iterdir())
    assert run(tmp_path, ENABLE) == ["True", str(folder)]


@pytest.fixture
def undecided(monkeypatch, tmp_path):
    """A process that has compiled, and where nothing has been decided about the cache."""
    names = (
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: getattr(jax.config, name) for name in names}
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(compile_cache, "_decided", False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize(
    "environment, given, expected",
    [
        ({}, [None], "home/jaxshare/compiled"),
        ({"JAXSHARE_CACHE": "moved"}, [None], "moved/compiled"),
        ({"JAXSHARE_COMPILE_CACHE": "own"}, [None], "own"),
        ({"JAXSHARE_COMPILE_CACHE": "own"}, ["given"], "given"),
        ({"JAXSHARE_COMPILE_CACHE": "off"}, [None], None),
        ({}, ["off", None], None),
        ({}, ["first", "second", None], "second"),
    ],
)
def test_the_folder_is_the_one_that_was_asked_for(
    undecided, monkeypatch, environment, given, expected
):
    def place(name):
        return name if name in (None, "off") else str(undecided / name)

    for name, value in environment.items():
        monkeypatch.setenv(name, place(value))
    for folder in given:
        found = compile_cache.enable(place(folder))
    expected = undecided / expected if expected else None
    assert found == expected
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.jit(lambda x: jnp.cos(x) @ x)(jnp.ones((3, 3))).block_until_ready()
    assert [*undecided.iterdir()] == (
        [undecided / expected.relative_to(undecided).parts[0]] if expected else []
    )
    assert expected is None or any(expected.iterdir())


def test_what_jax_was_told_is_left_as_it_is(undecided):
    jax.config.update("jax_compilation_cache_dir", str(undecided / "jax"))
    assert compile_cache.enable() == undecided / "jax"
    assert compile_cache.enable(undecided / "given") == undecided / "given"


def test_a_folder_that_cannot_be_written_is_refused_if_it_was_asked_for(undecided, monkeypatch):
    (undecided / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(undecided / "file"))
    assert compile_cache.enable() is None
    with pytest.raises(
        ValueError, match=r"compiled programs is '.*/file', but that is a file; give"
    ):
        compile_cache.enable(undecided / "file")
    monkeypatch.setattr(compile_cache, "_decided", False)
    monkeypatch.setenv("JAXSHARE_COMPILE_CACHE", str(undecided / "file"))
    with pytest.raises(
        ValueError, match=r"JAXSHARE_COMPILE_CACHE is '.*/file', but that is a file"
    ):
        compile_cache.enable()


def test_a_program_that_takes_long_to_compile_is_reported_while_it_does():
    compiling, now = threading.Event(), time.time()
    said: list[tuple[str, bool]] = []

    class Listed(progress.Display):
        def begin(self, what, *rest):
            said.append((what, compiling.is_set()))
            return super().begin(what, *rest)

    display = Listed(lambda: None)

    def many_steps(x):
        x = x * now  # so that it is in no cache
        for _ in range(400):
            x = jnp.sin(x) @ jnp.cos(x)
        return x

    traced = jax.jit(many_steps).lower(jnp.ones((4, 4)))
    with reported_compiles(display):
        compiling.set()
        traced.compile()
        compiling.clear()
    assert said == [("compiling many_steps", True)] and not display.under_way

    @jax.jit
    def inner(x):
        return x * now

    said.clear()
    ones = np.ones(3, np.float32)
    with reported_compiles(display):
        jax.jit(lambda x: inner(x) + 1).lower(ones)
        with pytest.raises(ZeroDivisionError):
            jax.jit(lambda x: 1 // 0).lower(ones)
        inner(ones)
    names = [what for what, _ in said]
    # Tracing and lowering; the trace of the inner function is a part of the outer one's.
    assert names[:3] == ["compiling <lambda>"] * 3 and "compiling inner" in names[3:]
    assert not display.under_way
    traced.compile()
    assert [what for what, _ in said] == names


def test_compiling_is_shown_once_however_often_it_is_asked_for():
    display, shown = progress.Display(lambda: None, ticks=False), []
    with reported_compiles(display), reported_compiles(display):

        @jax.jit
        def never_seen_before(x):
            shown.append(display.under_way)
            return x * 41.5

        never_seen_before(jnp.arange(3.0))
    assert shown == [["compiling never_seen_before"]] and not display.under_way
    with reported_compiles(display):
        jax.jit(lambda x: shown.append(display.under_way) or x - 0.125)(jnp.arange(3.0))
    assert len(shown[-1]) == 1
