"""Fuzzing of all that reads what others write: by hypothesis, and by Atheris where it installs."""

import copy
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from scripts.drill.drill import Drill
from scripts.drill.reader import Reader
from tests.drill.damage import random_damages
from tests.drill.fuzz_targets import SECONDS, TARGETS, Target

_EXAMPLES = {"checkpoint": 4, "template": 10, "tokenizer": 10, "tokenizer config": 10}
"""The examples of a case, where they are fewer than others': a tokenizer takes 0.1 s."""
_OTHERS = 40
_LONGEST = 2**26
"""Bytes of a content: what is longer is cut."""
_COMPILE_SECONDS = 120.0
_DEEP, _SPOILT = "\ue000deep\ue000", "\ue001"
"""Texts in whose place the encoded content has deep nesting, and half a surrogate pair."""

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([2**31 - 1, 2**31, -(2**31) - 1, 2**63, 2**64, 10**30, 10**400]),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 1e-320, 1e308, 3.5e38]),
    st.text(max_size=8),
    st.sampled_from(["", "\0", "../x", "é" * 100_000, "\ud800", "\u2028", _DEEP, _SPOILT, "1"]),
    st.lists(st.integers(-2, 33) | st.text(max_size=2) | st.none(), max_size=4),
    st.dictionaries(st.text(max_size=2), st.floats() | st.none() | st.lists(st.none()), max_size=2),
)
"""Values that no field expects."""


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of a JSON value's parts, of which there may be thousands: of the first ones."""
    yield path
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, part in itertools.islice(inner, 30):
        yield from _paths(part, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@st.composite
def contents(draw: st.DrawFn, target: Target) -> bytes:
    """A valid content with one to three changes of its values, of its bytes, or of both."""
    random_bytes = random.Random(draw(st.integers(0, 2**32)))
    content = target.valid()
    if target.encode and draw(st.integers(0, 3)):
        value = target.value()
        for _ in range(draw(st.integers(1, 3))):
            value = _changed(draw, value)
        try:
            content = target.encode(value)
        except (TypeError, ValueError, AttributeError):  # no file has such a value
            content = json.dumps(value).encode()
        content = _spoilt(content)[:_LONGEST]
        if draw(st.integers(0, 4)):
            return content
    if target.file.endswith("jinja") and draw(st.booleans()):
        return _with_jinja(draw, content)
    if not content or not draw(st.integers(0, 15)):
        return draw(st.binary(max_size=200))
    return next(iter(random_damages(content, random_bytes, 1)))[1]


def _changed(draw: st.DrawFn, value: Any) -> Any:
    value = copy.deepcopy(value)
    path = draw(st.sampled_from([*_paths(value)]))
    if not path:
        return value if draw(st.integers(0, 5)) else draw(ODD)
    holder, key = _at(value, path[:-1]), path[-1]
    change = draw(st.integers(0, 5))
    if change == 0:
        del holder[key]
    elif change == 1:
        other = draw(st.sampled_from([*_paths(value)]))
        holder[key] = copy.deepcopy(_at(value, other))
    elif change == 2 and isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key])] * draw(st.sampled_from([1, 2, 1000]))
    elif change == 2:
        holder[draw(st.text(max_size=4))] = draw(ODD)
    else:
        holder[key] = draw(ODD)
    return value


def _spoilt(content: bytes) -> bytes:
    """Puts in the place of marks what no encoder writes."""
    deep = b"[" * 100_000 + b"]" * 100_000
    marks = (json.dumps(_DEEP).encode(), deep), (json.dumps(_SPOILT)[1:-1].encode(), b"\\ud800")
    for mark, instead in marks:
        content = content.replace(mark, instead)
    return content


_JINJA = (
    "{{", "}}", "{%", "%}", "{% for m in messages %}", "{% endfor %}", "{{ messages[9].content }}",
    "{{ messages * 10 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ 'x' * 10**10 }}",
    "{{ 9**9**9 }}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{{ 1/0 }}",
    "{% set x = [] %}{% set _ = x.append(x) %}{{ x }}", "{% include 'x' %}", "{{ lipsum(9999) }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "{{ strftime_now('%') }}",
    "{{ messages | tojson(indent=99999999) }}", "{{ '%999999999d' | format(1) }}", "((((", "\0",
)  # fmt: skip


def _with_jinja(draw: st.DrawFn, content: bytes) -> bytes:
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(st.sampled_from(_JINJA)).encode() + content[at:]
    return content


@functools.cache
def reader() -> Reader:
    """The process that reads."""
    return Reader("tests.drill.fuzz_targets", {"HF_HUB_OFFLINE": "1"})


def wrong(kind: str, content: bytes) -> str:
    """Has a content read; returns what is wrong with how that ends, or ""."""
    folder = Path(tempfile.mkdtemp(prefix="jaxshare-drill-"))
    try:
        (folder / "content").write_bytes(content)
        (folder / "inside").mkdir()
        request = {"kind": kind, "folder": str(folder / "inside")}
        seconds = 3 * SECONDS + _COMPILE_SECONDS * (kind == "checkpoint")
        return reader().ask(request | {"file": str(folder / "content")}, seconds)["wrong"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def throw_contents(rng: random.Random, folder: Path) -> int:
    """Contents of a random kind are read: a value, or an error in a sentence that names the file.

    What fails is left as small as hypothesis makes it, in words; the kind and the content are
    written to a file that the error names, for the corpus.
    """
    kind, count = rng.choice([*TARGETS]), 0
    examples = _EXAMPLES.get(kind, _OTHERS)

    @hypothesis.seed(rng.randrange(2**32))
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=[*hypothesis.HealthCheck],
        report_multiple_bugs=False,
    )
    @hypothesis.given(contents(TARGETS[kind]))
    def attack(content: bytes) -> None:
        nonlocal count
        count += 1
        if found := wrong(kind, content):
            kept = Path(tempfile.gettempdir()) / "jaxshare-fuzz" / kind
            kept.mkdir(parents=True, exist_ok=True)
            name = kept / hashlib.sha256(content).hexdigest()[:12]
            name.write_bytes(content)
            raise AssertionError(f"{kind}: {found} ({name})")

    attack()
    if importlib.util.find_spec("atheris") and rng.random() < 0.1:
        count += _throw_by_coverage(rng, folder)
    return count


_BY_COVERAGE = ("config", "generation", "safetensors", "index", "batch", "task", "runs", "journal")
_RUNS = 3000


def _throw_by_coverage(rng: random.Random, folder: Path) -> int:
    """Lets Atheris look for bytes that reach new lines of a reader; returns how many it tried."""
    kind, corpus = rng.choice(_BY_COVERAGE), folder / "corpus"
    corpus.mkdir()
    (corpus / "valid").write_bytes(TARGETS[kind].valid())
    command = [sys.executable, "-m", "tests.drill.fuzz_by_coverage", kind, str(corpus)]
    options = [f"-seed={rng.randrange(1, 2**31)}", f"-runs={_RUNS}", f"-timeout={SECONDS:.0f}"]
    limits = ["-rss_limit_mb=3000", "-max_len=20000", f"-artifact_prefix={folder}/", "-verbosity=0"]
    done = subprocess.run(
        [*command, *options, *limits],
        capture_output=True,
        timeout=600,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    found = [line for line in done.stderr.splitlines() if "AssertionError" in line]
    assert done.returncode == 0, f"{kind}, by coverage: {(found or [done.stderr[-300:]])[0]}"
    return _RUNS


DRILLS = [
    Drill(
        "fuzz",
        "what others write is read, or refused in one sentence, in seconds and a GB at most",
        "wrong types, lost and doubled fields, extreme numbers, deep nesting, random bytes",
        throw_contents,
    )
]
