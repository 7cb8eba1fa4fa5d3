"""Every kind of file that is read back, damaged in every 64th byte: the same result, or an error
that names the file."""

import json
import random

import pytest

from jaxshare.serving.checkpoints import CheckpointStore, SavedCheckpoint, SaveError
from tests.drill.damage import Outcome, Readable, damages, random_damages, survive, survive_these
from tests.drill.kinds import CHECKPOINTS, KINDS, QUICK


def test_the_damages_are_flips_cuts_and_zeroes():
    content = bytes(range(130))
    found = dict(damages(content))
    assert len(found) == 9 and found["cut at byte 64"] == content[:64]
    assert found["bit 1 of byte 64 flipped"] == content[:64] + b"\x42" + content[65:]
    assert found["2 zeroes at byte 128"] == content[:128] + bytes(2)
    assert found["64 zeroes at byte 0"] == bytes(64) + content[64:]


def test_random_damages_follow_from_the_seed_and_are_of_every_kind():
    content = bytes(range(200))
    found, again = ([*random_damages(content, random.Random(3), 200, b"other")] for _ in range(2))
    assert found == again and found[-1] == ("another file in its place", b"other")
    said = " ".join(words for words, _ in found)
    for kind in ("flipped", "cut at", "zeroes", "moved", "doubled", "lost", "appended", ", then"):
        assert kind in said


def test_the_drill_finds_a_reader_that_takes_what_it_gets(tmp_path):
    file = tmp_path / "numbers.json"
    file.write_text(json.dumps([*range(10, 60)]))
    with pytest.raises(AssertionError, match=r"numbers.json, .* (flipped|zeroes|cut)"):
        survive(Readable(file, lambda: sum(json.loads(file.read_bytes())), name="numbers"))
    sizes = {len(file.read_bytes()): 1}
    reader = Readable(file, lambda: sizes[len(file.read_bytes())], other=b" " * file.stat().st_size)
    with pytest.raises(AssertionError, match=r"numbers\.json, cut at byte 0: KeyError"):
        survive(reader)
    assert reader.other and len(reader.other) == len(file.read_bytes())
    with pytest.raises(AssertionError, match="another file in its place"):
        survive_these(reader, random_damages(b"", random.Random(0), 0, reader.other))
    assert json.loads(file.read_bytes()) == [*range(10, 60)], "it is as it was"


@pytest.mark.parametrize("kind", QUICK)
def test_a_file_of_every_kind(tmp_path, kind):
    for readable in QUICK[kind](tmp_path, random.Random(0)):
        outcome = survive(readable)
        assert outcome.named >= readable.least
        if kind == "trace":
            assert outcome.named == outcome.cases
        if readable.other is not None:
            survive_these(readable, [("another file in its place", readable.other)])


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        pytest.param(kind, least, marks=[pytest.mark.slow] if least > 30 else [])
        for kind, least in zip(CHECKPOINTS, (30, 300, 300), strict=True)
    ],
)
def test_checkpoints(tmp_path, kind, least):
    whole = Outcome()
    for readable in CHECKPOINTS[kind](tmp_path, random.Random(0)):
        whole.add(survive(readable))
    assert whole.named > least and whole.named + whole.same == whole.cases


def test_damaged_times_of_a_checkpoint_are_named(tmp_path):
    """Orbax reads those of all checkpoints before any is opened, and raises errors of its own."""
    KINDS["checkpoint"](tmp_path, random.Random(0))
    file = tmp_path / "2" / "_CHECKPOINT_METADATA"
    times = json.loads(file.read_bytes())
    file.write_text(json.dumps(times | {"commi": 1, "init": 2}))
    for opened in (SavedCheckpoint, CheckpointStore):
        with pytest.raises(SaveError, match=r"_CHECKPOINT_METADATA of a .* move that checkpoint"):
            opened(tmp_path)
    file.parent.rename(tmp_path / "away")
    with SavedCheckpoint(tmp_path) as saved:
        assert saved.number == 1
