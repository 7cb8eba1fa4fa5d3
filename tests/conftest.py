"""Settings that every test runs under."""

import atexit
import collections
import logging
import os
import secrets
import shutil
import signal
import tempfile

# Before JAX is imported. Tests run on the CPU unless the caller names another platform, and never
# touch the network.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell lets programs in the background ignore Ctrl-C, which tests send to themselves and to what
# they begin.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What somebody has calibrated on this machine must not decide what a test sees.
os.environ["JAXSHARE_CACHE"] = os.path.join(os.path.dirname(__file__), "fixtures", "no-calibration")

# Ray listens on every interface: its clusters take a token that only this run of the tests knows,
# and none is written to the home folder.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

# Tests compile much and run it once: on the CPU, programs that are made quickly are done sooner.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# What one process of a run has compiled the others take: those of xdist, and those that tests
# begin.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxshare-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import gc
from pathlib import Path

import hypothesis
import jax
import pytest

from tests import arenas, typechecking

typechecking.install()

# A bfloat16 that silently becomes a float32 costs memory and hides mistakes: every promotion has to
# be written out.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# So that a CPU shows as eight devices, for tests of meshes. All else runs on the first of them.
jax.config.update("jax_num_cpu_devices", 8)

# The first example of a shape compiles, which takes longer than any deadline that would catch a
# slow one. Examples are the same in every run, so that a failure seen once is seen again;
# `--hypothesis-profile=explore` draws new ones.
hypothesis.settings.register_profile("jaxshare", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, derandomize=False, max_examples=1000)
hypothesis.settings.load_profile("jaxshare")


_MOST_MAPS = 58_000
_LONG = {
    "workers/test_session.py",
    "workers/test_session_ends.py",
    "workers/test_checkpoint.py",
    "core/test_sharding.py",
    "engine/test_engine.py",
    "engine/test_random_mixed_schedules.py",
    "engine/test_mixed_load.py",
    "engine/test_warm_up.py",
    "serving/test_errors.py",
    "branches/test_branches.py",
    "attention/test_attention.py",
    "decoding/test_decode.py",
    "pallas/test_mosaic_gpu.py",
    "models/test_parity.py",
    "cli/test_main.py",
    # Long with `make test-all` alone.
    "cli/test_devices.py",
    "cli/test_batch.py",
    "kvcache/test_lease.py",
}


_made = collections.Counter[str]()


@jax.monitoring.register_event_duration_secs_listener
def _count_programs(event: str, seconds: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _made["programs"] += 1
        _made["milliseconds"] += round(1000 * seconds)


@pytest.fixture(autouse=True)
def few_programs():
    """Forgets compiled programs when there are many: each maps pieces of memory of its own, six or,
    for a decode loop, 660, of which Linux lets a process have 65,530; then the compiler crashes. They
    are counted once in 50 programs or 8 seconds of the compiler: to read of tens of thousands takes
    longer than most tests, and to forget them all takes ten seconds."""
    yield
    if _made["programs"] < 50 and _made["milliseconds"] < 8000:
        return
    _made.clear()
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@hypothesis.given(hypothesis.strategies.none())
def _nothing(_):
    """Nothing is tested by it."""


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What imports and collection make stays to the end: no garbage is looked for among it, and
    seldom among what tests make."""
    from jaxshare.garbage import collect_seldom

    # The first test of Hypothesis registers a generator, which it looks for among the collector's
    # objects: from Python 3.14 on it does not find it where they are frozen.
    _nothing()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        collect_seldom()
        gc.enable()


def pytest_collection_modifyitems(items):
    """What takes longest comes first, so that no process of xdist is left with it at the end."""

    def is_short(item) -> bool:
        file, _, _ = item.nodeid.partition("::")
        return "/".join(file.split("/")[-2:]) not in _LONG

    items.sort(key=is_short)


def pytest_configure(config):
    """`-m gpu` is for the best device there is, and programs are shared where slow tests are left out."""
    if config.option.markexpr == "gpu" and jax.config.jax_platforms == "cpu":
        jax.config.update("jax_platforms", None)
    if "not slow" in config.option.markexpr:
        arenas.share_sizes()


@pytest.fixture(autouse=True)
def logs_are_left_as_they_were():
    """Commands and examples that run in the process of the tests set levels, and add handlers."""

    def logs():
        found = logging.root.manager.loggerDict.items()
        return [log for name, log in found if name.startswith("jaxshare") if hasattr(log, "level")]

    levels = {log: log.level for log in logs()}
    whole = logging.getLogger("jaxshare")
    handlers = [*whole.handlers]
    yield
    for log in logs():
        log.setLevel(levels.get(log, logging.NOTSET))
    whole.handlers[:] = handlers
