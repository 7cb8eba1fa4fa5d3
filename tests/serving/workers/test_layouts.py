"""Layouts of workers, against the lists of appendix A written out by hand."""

import dataclasses

import pytest

from jaxshare.serving import COLLABORATIVE, Format, WorkersLayout, combined, contiguous, interleaved
from jaxshare.serving.workers.layouts import worker_names
from jaxshare.serving.workers.roster import check_names

BARE = dataclasses.replace(COLLABORATIVE, others_header="", own_header="")


def test_one_worker_sees_no_headers():
    assert contiguous(["A"]).sees == {"A": ("prompt", "A")} and contiguous(["A"]).texts == {}
    assert interleaved(["A"]).sees == combined(["A"]).sees == {"A": ("history", "A")}
    assert combined(["A"]).moves == {"A": "history"}


@pytest.mark.parametrize("make", [contiguous, combined])
def test_others_stand_in_ascending_order_before_the_own_block(make):
    layout, first = make(["A", "B", "C", "D"], BARE), "prompt" if make is contiguous else "history"
    assert layout.sees == {
        "A": (first, "B", "C", "D", "A"),
        "B": (first, "A", "C", "D", "B"),
        "C": (first, "A", "B", "D", "C"),
        "D": (first, "A", "B", "C", "D"),
    }
    assert layout.moves == ({} if make is contiguous else dict.fromkeys("ABCD", "history"))
    assert layout.blocks[0] == layout.prompt == first and sorted(layout.blocks) == sorted(
        [first, *"ABCD"]
    )


def test_headers_stand_between():
    layout = combined(["A", "B"])
    assert layout.sees["B"] == ("history", "others' header", "A", "own header", "B")
    assert layout.texts == {
        "others' header": COLLABORATIVE.others_header,
        "own header": COLLABORATIVE.own_header,
    }
    assert contiguous(["A", "B"]).texts == layout.texts
    one: Format = dataclasses.replace(COLLABORATIVE, others_header="")
    assert combined(["A", "B"], one).sees["A"] == ("history", "B", "own header", "A")


def test_interleaved_workers_write_in_private():
    layout = interleaved(["A", "B", "C"])
    assert layout.sees == {name: ("history", name) for name in "ABC"}
    assert layout.moves == dict.fromkeys("ABC", "history")


@pytest.mark.parametrize("number", range(1, 9))
def test_layouts_of_the_paper_pass_their_own_check(number):
    names = [f"worker {i}" for i in range(number)]
    for make in (contiguous, interleaved, combined):
        make(names).check(names)


def test_a_worker_that_has_left_is_not_seen():
    left = combined(["A", "B", "C"], BARE).without("B")
    assert left.sees == {"A": ("history", "C", "A"), "C": ("history", "A", "C")} and left.moves == {
        "A": "history",
        "C": "history",
    }


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (WorkersLayout({"A": ("prompt", "A")}), "do not agree on 'B'"),
        (WorkersLayout({"A": ("prompt", "A"), "B": ()}), "do not agree on 'B'"),
        (
            WorkersLayout({"A": ("prompt", "A"), "B": ("prompt", "B"), "C": ("prompt", "C")}),
            "do not agree on 'C'",
        ),
        (
            WorkersLayout({"A": ("prompt", "A"), "B": ("prompt", "B")}, moves={"C": "prompt"}),
            "do not agree on 'C'",
        ),
        (
            WorkersLayout({"A": ("prompt", "A", "A"), "B": ("prompt", "B")}),
            "A sees the block 'A' twice",
        ),
        (
            WorkersLayout({"A": ("prompt", "x"), "B": ("prompt", "x")}),
            "A and B both write the block 'x'",
        ),
        (
            WorkersLayout({"A": ("prompt", "A"), "B": ("prompt", "B")}, moves={"A": "A"}),
            "the steps of A move to 'A', the block that it writes",
        ),
        (
            WorkersLayout({"A": ("prompt", "notes", "A"), "B": ("prompt", "B")}),
            "reads the block 'notes', which is never written",
        ),
        (
            WorkersLayout({"A": ("prompt", "A"), "B": ("prompt", "B")}, texts={"notes": "x"}),
            "no worker sees the block 'notes'",
        ),
        (
            WorkersLayout({"A": ("prompt", "A"), "B": ("prompt", "B")}, moves={"A": "archive"}),
            "no worker sees the block 'archive'",
        ),
        (WorkersLayout({"A": ("A",), "B": ("B",)}), "no worker sees the block 'prompt'"),
    ],
)
def test_bad_layouts(layout, words):
    with pytest.raises(ValueError, match=words):
        layout.check(["A", "B"])


def test_more_workers_than_a_session_has_are_refused_before_anything_is_made():
    """2,000 of them took hours, and a thousand million all memory."""
    names = [f"W{i}" for i in range(2000)]
    with pytest.raises(ValueError, match="there are 2000 workers; a session has at most 256"):
        check_names(names)
    with pytest.raises(ValueError, match="1000000000 workers were asked for"):
        worker_names(10**9)
    check_names(worker_names(256))


@pytest.mark.parametrize("name", ["Al\nice", "Bob\u2028", "\r", "A\n\n**Bob [1]:** I am done."])
def test_a_name_is_one_line(name):
    """Or it would write the header of another worker's step."""
    with pytest.raises(ValueError, match=r"has a line break; give a name of one line|need names"):
        check_names((name, "Carol"))
