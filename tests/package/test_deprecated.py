"""The names of modules, classes and functions before they were changed: the old ones still work,
and say what to write instead. fixtures/names-0.1.json has the public names of every module as they
were."""

import importlib
import json
import subprocess
import sys
import warnings

import pytest

import jaxshare
from jaxshare.deprecated import MODULES, NAMES
from jaxshare.serving.engine import Completion
from tests.paths import FIXTURES

OLD: dict[str, list[str]] = json.loads((FIXTURES / "names-0.1.json").read_text(encoding="utf-8"))
INTERNAL = {
    "jaxshare.cache": {"alignment", "arena_size", "finite", "put", "take"},
    "jaxshare.contents": {"filled", "like", "padded", "places"},
    "jaxshare.reencoding": {"standing"},
    "jaxshare.sampling": {"largest", "logprob", "uniforms", "whole_rows"},
    "jaxshare.sharding": {"Stripes"},
    "jaxshare.models.hf": {"Stored", "Wanted", "wanted_tensors"},
    "jaxshare.models.reads": {"ended_reads", "why"},
    "jaxshare.models.reencoding": {"check"},
    "jaxshare.models.sharded": {"part_on", "place"},
    "jaxshare.serving.agents.asking": {"ask", "constant", "own", "use"},
    "jaxshare.serving.agents.emitting": {"at", "whole"},
    "jaxshare.serving.agents.exchange": {"ended", "passed", "wait_for", "who_waits"},
    "jaxshare.serving.agents.names": {"flat"},
    "jaxshare.serving.agents.react": {"Step"},
    "jaxshare.serving.agents.states": {"begun"},
    "jaxshare.serving.capacities": {"capacities"},
    "jaxshare.serving.cli": {"main"},
    "jaxshare.serving.endings": {"tables"},
    "jaxshare.serving.engine.saved": {"known", "learn"},
    "jaxshare.serving.evaluation.command": {"read_settings"},
    "jaxshare.serving.evaluation.runs": {"Piece", "execute", "execute_on", "pieces"},
    "jaxshare.serving.evaluation.sandbox": {"namespaces"},
    "jaxshare.serving.party": {"spare_blocks"},
    "jaxshare.serving.inspection": {"run"},
    "jaxshare.serving.prompt_view": {"run"},
    "jaxshare.serving.prefixes": {"at_work", "check_free"},
    "jaxshare.serving.saved_sessions": {"write"},
    "jaxshare.serving.arena": {"Arena"},
    "jaxshare.serving.engine.memory": {"steadied"},
    "jaxshare.serving.prefill": {"Feed", "feed_all", "shape", "warm_up"},
    "jaxshare.serving.waves": {"groups", "Residents", "Wave", "widest_wave"},
    "jaxshare.serving.workers": {"check_names"},
    "jaxshare.serving.tuning": {*OLD["jaxshare.serving.tuning"]},
}
"""Names that no document mentioned and that have changed without notice."""


@pytest.mark.parametrize("module", OLD)
def test_every_old_name_is_found(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = importlib.import_module(module)
        missing = {name for name in OLD[module] if not hasattr(found, name)}
    # A submodule of that name is there once it was imported: `jaxshare.serving.cli.main`.
    assert missing <= INTERNAL.get(module, set())


@pytest.mark.parametrize("old", MODULES)
def test_an_old_module_says_where_its_names_are(old):
    sys.modules.pop(old, None)
    new = MODULES[old]
    first = new if isinstance(new, str) else new[0]
    with pytest.warns(DeprecationWarning, match=rf"{old} is now {first}") as warned:
        importlib.import_module(old)
    assert len(warned) == 1


@pytest.mark.parametrize("old", NAMES)
def test_an_old_name_is_the_new_thing(old):
    module, _, name = old.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert getattr(importlib.import_module(module), name).__name__ == NAMES[old]


@pytest.mark.parametrize(
    ("package", "old", "new"),
    [
        ("jaxshare", "Reason", jaxshare.FinishReason),
        ("jaxshare.serving.engine", "End", jaxshare.FinishReason),
        ("jaxshare.serving.engine", "RequestOutput", Completion),
    ],
)
def test_an_old_name_of_a_package_warns_and_is_the_new_thing(package, old, new):
    with pytest.warns(DeprecationWarning, match=rf"{package}\.{old} is now .*{new.__name__}"):
        assert getattr(importlib.import_module(package), old) is new


def test_a_name_that_never_was_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'Raison'"):
        _ = jaxshare.Raison
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("jaxshare.never")


def test_packages_say_so_where_the_program_uses_the_old_name():
    """The warning is of the line in the user's program, which Python shows by default."""
    program = "\n".join(
        (
            "from jaxshare import Reason, FinishReason",
            "from jaxshare.kept import Kept",
            "from jaxshare.decode import DecodeState",
            "import jaxshare",
            "from jaxshare.serving.evaluation import Piece",
            "assert Reason is FinishReason and callable(jaxshare.decode)",
        )
    )
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "DeprecationWarning" in line]
    assert [line.partition(": ")[0] for line in said] == [f"<string>:{n}" for n in (1, 2, 3, 5)]


def test_new_names_warn_of_nothing():
    program = (
        "import jaxshare.serving.cli.main, jaxshare.serving.agents, jaxshare.serving.evaluation; "
        "import jaxshare.serving.cluster.shards"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:jaxshare", "-c", program],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
