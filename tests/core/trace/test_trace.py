"""Traces against plain lists of tokens: what each token sees, and in which order; files that are
cut, changed or something else."""

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest

from jaxshare.trace.recorder import Recorder
from jaxshare.trace.trace import NOT_ENDED, Trace
from tests.helpers import run, tiny_state

LISTED = ([0, 2, 1], [0, 1, 2], [0, 3])


@dataclasses.dataclass
class Lists:
    """The oracle: blocks as lists of numbers of tokens; for each token those that it sees, itself
    last, in the order of its row."""

    blocks: list[list[int]]
    sees: list[list[int]] = dataclasses.field(default_factory=list)

    def feed(self, counts: Sequence[int], layout: Sequence[Sequence[int]]) -> None:
        number = len(self.sees)
        new = [
            list(range(number + sum(counts[:r]), number + sum(counts[: r + 1])))
            for r in range(len(counts))
        ]
        for tokens, row in zip(new, layout, strict=True):
            self.blocks[row[-1]] += tokens
        for tokens, row in zip(new, layout, strict=True):
            for token in tokens:
                before = [other for block in row[:-1] for other in self.blocks[block]]
                own = self.blocks[row[-1]]
                self.sees.append([*before, *own[: own.index(token) + 1]])

    def move(self, source: int, target: int) -> None:
        self.blocks[target] += self.blocks[source]
        self.blocks[source] = []


def random_session(seed: int, passes: int = 30) -> tuple[Recorder, Lists]:
    """A prompt, then passes of up to three tokens of three rows, with moves, cuts and texts between
    them."""
    rng = random.Random(seed)
    recorder, lists = Recorder(4), Lists([[] for _ in range(4)])
    recorder.text(range(5), 0)
    lists.feed([5], [[0]])
    for _ in range(passes):
        counts = [rng.choice((0, 1, 1, 2, 3)) for _ in LISTED]
        recorder.feed([[rng.randrange(90)] * n for n in counts], LISTED)
        lists.feed(counts, LISTED)
        for source in (1, 2, 3):
            if rng.random() < 0.15:
                recorder.move(source, 0)
                lists.move(source, 0)
        if rng.random() < 0.1:
            recorder.cut(3, 0)
            lists.blocks[3] = []
        if rng.random() < 0.1 and lists.blocks[1]:
            recorder.cut(1, len(lists.blocks[1]) - 1)
            lists.blocks[1].pop()
    return recorder, lists


def seen_by(trace: Trace, token: int) -> dict[int, int]:
    """The tokens that one sees, by their positions in its row's order: read from the trace's
    integers, one placement at a time."""
    view = trace.row_pass[token]
    seen, when = trace.seen[token], trace.passes[view]
    placements = zip(
        trace.placement_tokens,
        trace.placement_blocks,
        trace.placement_indices,
        trace.placement_starts,
        trace.placement_ends,
        strict=True,
    )
    found = [
        (int(trace.starts[view, block] + index), int(other))
        for other, block, index, start, end in placements
        if start <= when < end and index < seen[block]
    ]
    assert len({place for place, _ in found}) == len(found), "two keys at one position"
    return dict(found)


@pytest.mark.parametrize("seed", range(4))
def test_a_trace_says_what_each_token_sees_and_where(seed):
    recorder, lists = random_session(seed)
    trace = recorder.trace()
    assert trace.num_tokens == len(lists.sees) > 60
    for token, expected in enumerate(lists.sees):
        assert seen_by(trace, token) == dict(enumerate(expected))
        assert trace.positions[token] == len(expected) - 1
    assert (
        trace.lengths.tolist()
        == [len(block) for block in lists.blocks]
        == recorder.lengths.tolist()
    )
    for block, held in enumerate(lists.blocks):
        left = (trace.placement_ends == NOT_ENDED) & (trace.placement_blocks == block)
        assert (
            trace.placement_tokens[left][np.argsort(trace.placement_indices[left])].tolist() == held
        )


def test_tokens_come_in_the_order_in_which_they_were_fed():
    recorder = Recorder(3)
    assert recorder.text([7, 8], 0).tolist() == [0, 1]
    assert recorder.text([], 0).tolist() == []
    first, none, second = recorder.feed([[1, 2], [], [3]], [[0, 1], [], [0, 2]])
    assert first.tolist() == [2, 3] and second.tolist() == [4] and not none.size
    recorder.feed([[], []], [[0, 1], [0, 2]])
    trace = recorder.trace(names=("a", "b", "c"))
    assert (
        trace.tokens.tolist() == [7, 8, 1, 2, 3]
        and trace.rows.tolist() == [-1, 0, 2]
        and trace.passes.tolist() == [0, 1, 1]
    )
    assert trace.capacities.tolist() == [2, 2, 1] and trace.num_passes == 2


def test_a_step_that_moves_on_before_anybody_sees_it_was_nowhere_between():
    recorder = Recorder(3)
    recorder.feed([[1, 2]], [[1]])
    recorder.move(1, 2)
    recorder.move(2, 0)
    recorder.feed([[3]], [[0, 1]])
    trace = recorder.trace()
    assert list(
        zip(trace.placement_tokens.tolist(), trace.placement_blocks.tolist(), strict=True)
    ) == [
        (0, 1),
        (0, 0),
        (1, 1),
        (1, 0),
        (2, 1),
    ]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda r: r.feed([[1]], [[4]]), "there is no block 4; the trace has blocks 0 to 2"),
        (lambda r: r.feed([[1]], [[]]), "row 0 brings 1 tokens but lists no block"),
        (lambda r: r.feed([[1]], [[0, 1, 0]]), r"row 0 lists a block twice: \[0, 1, 0\]"),
        (lambda r: r.feed([[1], [2]], [[0, 1], [1]]), "two rows write one block"),
        (lambda r: r.feed([[1], [2]], [[0, 1]]), "tokens are given for 2 rows, and blocks for 1"),
        (
            lambda r: r.feed([[1] * 5], [[1]]),
            "block 1 has 0 tokens of at most 4, and 5 more do not fit",
        ),
        (lambda r: r.move(0, 0), "block 0 cannot be moved onto itself"),
        (lambda r: r.move(0, 1), "block 1 has 0 tokens of at most 4, and 6 more do not fit"),
        (lambda r: r.cut(0, 7), "block 0 has 6 tokens; it cannot be cut to 7"),
    ],
)
def test_a_recorder_refuses_what_a_cache_would(act, words):
    recorder = Recorder(3, [8, 4, 4])
    recorder.text([1] * 6, 0)
    with pytest.raises(ValueError, match=words):
        act(recorder)
    assert recorder.lengths.tolist() == [6, 0, 0] and recorder.trace().num_tokens == 6, (
        "a refused call changes nothing"
    )


def test_a_recorder_needs_blocks():
    with pytest.raises(ValueError, match="got 0 blocks and no capacities"):
        Recorder(0)
    with pytest.raises(ValueError, match="got 2 blocks and 1 capacities"):
        Recorder(2, [3])


def test_a_dispatch_is_no_longer_than_what_it_can_record():
    with pytest.raises(
        ValueError,
        match="passes is 5, but the state has room to record 4; create it with more, or run fewer "
        "at once",
    ):
        run(tiny_state([[1]] * 4, record=4), passes=5)


# recorders that continue


@pytest.mark.parametrize("seed", range(3))
def test_a_recorder_goes_on_where_a_trace_ends(seed):
    """At several places of a session: what comes after is recorded as though it had never
    stopped."""
    rng = random.Random(seed)
    recorder, lists = random_session(seed, passes=8)
    for _ in range(4):
        recorder, before = Recorder.of(recorder.trace()), recorder
        for _ in range(5):
            for each in (before, recorder, lists):
                each.move(1, 0)
            tokens = [[rng.randrange(90)] * rng.choice((0, 1, 2)) for _ in LISTED]
            for each in (before, recorder):
                each.feed(tokens, LISTED)
            lists.feed([*map(len, tokens)], LISTED)
        assert same(recorder.trace(), before.trace()) and recorder.lengths.tolist() == [
            *map(len, lists.blocks)
        ]
    trace = recorder.trace()
    for token, expected in enumerate(lists.sees):
        assert seen_by(trace, token) == dict(enumerate(expected))


def test_a_recorder_that_goes_on_keeps_to_its_capacities_if_it_is_told():
    recorder = Recorder(2, [4, 4])
    recorder.text([1, 2, 3], 0)
    trace = recorder.trace()
    with pytest.raises(
        ValueError, match="block 0 has 3 tokens of at most 4, and 2 more do not fit"
    ):
        Recorder.of(trace, trace.capacities.tolist()).text([4, 5], 0)
    free = Recorder.of(trace)
    free.text([4, 5], 0)
    assert free.trace().capacities.tolist() == [5, 4]
    with pytest.raises(
        ValueError,
        match="block 0 has 3 tokens at the end of the trace, but a capacity of 2; give the "
        "recorder larger",
    ):
        Recorder.of(trace, [2, 4])
    with pytest.raises(ValueError, match="got 2 blocks and 1 capacities"):
        Recorder.of(trace, [9])


# files


def same(a: Trace, b: Trace) -> bool:
    return all(
        np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Trace)
    )


def test_a_saved_trace_is_the_same(tmp_path):
    trace = random_session(0)[0].trace(
        names=("history", "Ada", "Bo", "notes"), fingerprint="of a model", context=77
    )
    trace.save(tmp_path / "new folder" / "one.trace")
    assert same(Trace.load(tmp_path / "new folder" / "one.trace"), trace)
    wide = dataclasses.replace(trace, tokens=trace.tokens + 100_000)
    wide.save(tmp_path / "new folder" / "one.trace")
    assert same(Trace.load(tmp_path / "new folder" / "one.trace"), wide)
    assert [file.name for file in (tmp_path / "new folder").iterdir()] == ["one.trace"], (
        "nothing is left beside it"
    )


def test_a_file_that_is_cut_short_or_damaged_is_refused(tmp_path):
    trace, file = random_session(0)[0].trace(), tmp_path / "one.trace"
    trace.save(file)
    whole = file.read_bytes()
    for size in (0, 1, 50, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(
            ValueError,
            match=r"one\.trace (does not start as a trace does|is a trace that is cut short or "
            r"damaged)",
        ):
            Trace.load(file)
    for at in range(0, len(whole), 31):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"one\.trace"):
            Trace.load(file)
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "nothing")


def test_a_file_of_another_kind_or_a_later_format_is_refused(tmp_path):
    file = tmp_path / "one.trace"
    random_session(0)[0].trace().save(file)
    file.write_bytes(file.read_bytes().replace(b"jaxshare trace 1 ", b"jaxshare trace 9 ", 1))
    with pytest.raises(ValueError, match="a trace of format 9, and this version reads format 1"):
        Trace.load(file)
    file.write_bytes(b'{"tokens": [1]}')
    with pytest.raises(ValueError, match="does not start as a trace does"):
        Trace.load(file)


# traces that are none


def cut_short(trace: Trace) -> Trace:
    return dataclasses.replace(trace, tokens=trace.tokens[:-3], row_pass=trace.row_pass[:-3])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut_short, "placement_tokens must not descend, and be between 0 and"),
        (
            lambda t: dataclasses.replace(t, tokens=t.tokens[:-1]),
            r"has row_pass of shape \(\d+,\); got",
        ),
        (
            lambda t: dataclasses.replace(
                t,
                **{
                    f.name: getattr(t, f.name)[:-2]
                    for f in dataclasses.fields(t)
                    if f.name.startswith("placement_")
                },
            ),
            r"cut short: token \d+ has no placement",
        ),
        (
            lambda t: dataclasses.replace(t, visible=t.visible + 1),
            r"cut short: token 0 sees more of block \d than it has then",
        ),
        (
            lambda t: dataclasses.replace(
                t,
                placement_ends=np.where(t.placement_ends == NOT_ENDED, 10**6, t.placement_ends),
                visible=t.visible * 0 + 9**6,
            ),
            "sees more of block",
        ),
        (lambda t: dataclasses.replace(t, passes=t.passes[::-1]), "passes must not descend"),
        (lambda t: dataclasses.replace(t, tokens=-t.tokens - 1), "tokens must be at least 0"),
        (
            lambda t: dataclasses.replace(t, placement_blocks=t.placement_blocks + 2),
            "a placement of the trace is in block 5, but it has blocks 0 to 3",
        ),
        (
            lambda t: dataclasses.replace(t, placement_ends=t.placement_starts),
            "ends before it starts",
        ),
        (
            lambda t: dataclasses.replace(
                t, placement_starts=t.placement_starts + (t.placement_starts == 0)
            ),
            "first placement of token 0 must start with",
        ),
        (
            lambda t: dataclasses.replace(t, capacities=t.capacities // 9),
            "block 0 at the end of the trace",
        ),
        (
            lambda t: dataclasses.replace(t, placement_indices=t.placement_indices + 1),
            "must have one token at each index from 0",
        ),
        (lambda t: dataclasses.replace(t, names=("only",)), "a trace of 4 blocks has 1 names"),
    ],
)
def test_arrays_that_do_not_belong_together_are_no_trace(change, words):
    trace = random_session(1)[0].trace()
    with pytest.raises(ValueError, match=words):
        change(trace)
