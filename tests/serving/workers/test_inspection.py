"""Snapshots of sessions, against numpy and by hand; their pictures; `jaxshare inspect`."""

import argparse
import dataclasses
import functools
import json
import random
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from jaxshare import KVCache
from jaxshare.serving import Workers, WorkersLayout, checksums, combined
from jaxshare.serving.branches import Branch, Branches
from jaxshare.serving.cli import demo
from jaxshare.serving.cli import inspect as inspect_command
from jaxshare.serving.evaluation import arithmetic
from jaxshare.serving.workers.inspection import probe
from jaxshare.serving.workers.inspection.plots import attention_picture, cache_picture
from jaxshare.serving.workers.inspection.probe import (
    AttentionProbe,
    AttentionShare,
    BlockExtent,
    Listed,
    Snapshot,
    attention_shares,
)
from tests.core.attention.test_block_share import Watched
from tests.helpers import (
    MODEL,
    TINY,
    VOCAB,
    DenseModel,
    mostly_slow,
    one_layer,
    pad_rows,
    tiny_params,
)
from tests.serving.workers.test_session import endless

BLOCKS, CAPACITIES = (
    ("history", "Bob", "notes", "Alice", "spare 1", "unused 1"),
    (200, 40, 20, 30, 8, 0),
)
SEES = {"Alice": ("history", "Bob", "notes", "Alice"), "Bob": ("history", "Alice", "Bob")}
LENGTHS = {"history": 25, "Bob": 4, "notes": 3, "Alice": 0, "spare 1": 0, "unused 1": 0}


@functools.cache
def session():
    """Two workers of the tiny model, one row free between them, and the same in numpy.

    Returns:
      The session, the dense model, and the tokens that they feed.
    """
    rng = np.random.default_rng(5)
    texts = {block: rng.integers(0, VOCAB, n).tolist() for block, n in LENGTHS.items() if n}
    dense = DenseModel(TINY, tiny_params(), len(BLOCKS))
    dense.shelves = [Watched([[] for _ in BLOCKS]) for _ in dense.shelves]
    cache = KVCache.create(TINY, CAPACITIES, jnp.float32)
    run = jax.jit(MODEL.apply)
    for block, text in texts.items():
        number = BLOCKS.index(block)
        tokens = jnp.asarray([text + [0] * (25 - len(text)), [0] * 25, [0] * 25])
        _, cache = run(
            tiny_params(),
            tokens,
            jnp.asarray([len(text), 0, 0]),
            cache,
            pad_rows([[number]], 3, len(BLOCKS)),
        )
        dense.forward([text], [[number]])
    fed = {"Alice": rng.integers(0, VOCAB, 3).tolist(), "Bob": rng.integers(0, VOCAB, 1).tolist()}
    rows = {"Alice": 2, "Bob": 0}
    tokens, count = np.zeros((3, 3), np.int32), np.zeros(3, np.int32)
    listed: list[list[int]] = [[], [], []]
    for name, row in rows.items():
        tokens[row, : len(fed[name])], count[row] = fed[name], len(fed[name])
        listed[row] = [BLOCKS.index(b) for b in SEES[name]]
    stand_in = types.SimpleNamespace(
        model=types.SimpleNamespace(module=MODEL, variables=tiny_params()),
        names=("Alice", "Bob"),
        blocks=BLOCKS,
        cache=cache,
        passes=17,
        layout=WorkersLayout(SEES, prompt="history"),
        rows=pad_rows(listed, 3, len(BLOCKS)),
        row=rows.__getitem__,
        pending=lambda: (tokens, count),
    )
    return stand_in, dense, fed


def test_a_snapshot_has_what_the_session_has():
    stand_in, _, _ = session()
    snapshot = Snapshot.of(stand_in)
    per_token = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    assert snapshot.passes == 17 and snapshot.names == ("Alice", "Bob") and snapshot.attention == ()
    assert [(b.name, b.length, b.capacity, b.bytes) for b in snapshot.blocks] == [
        (name, LENGTHS[name], capacity, LENGTHS[name] * per_token)
        for name, capacity in zip(BLOCKS, CAPACITIES, strict=True)
        if capacity
    ]
    assert [b.offset for b in snapshot.blocks] == [0, 200, 240, 260, 290]
    assert snapshot.rows == {
        "Alice": (
            Listed("history", 0, 25),
            Listed("Bob", 25, 4),
            Listed("notes", 29, 3),
            Listed("Alice", 32, 0),
        ),
        "Bob": (Listed("history", 0, 25), Listed("Alice", 25, 0), Listed("Bob", 25, 4)),
    }


def test_a_layout_on_paper():
    layout = WorkersLayout(SEES, prompt="history")
    snapshot = Snapshot.of_layout(layout, LENGTHS)
    assert snapshot.rows == Snapshot.of(session()[0]).rows
    assert [(b.name, b.offset, b.length, b.bytes) for b in snapshot.blocks] == [
        ("history", 0, 25, 0),
        ("Bob", 25, 4, 0),
        ("notes", 29, 3, 0),
        ("Alice", 32, 0, 0),
    ]
    with pytest.raises(
        ValueError,
        match="lengths has no length for the block 'notes'; the layout's blocks are history, Bob, "
        "notes, Alice",
    ):
        Snapshot.of_layout(layout, {"history": 3, "Bob": 1})


def test_masses_are_those_of_a_transformer_in_numpy_and_change_nothing():
    stand_in, dense, fed = session()
    before = jax.tree.map(np.asarray, stand_in.cache)
    found = attention_shares(stand_in)
    dense.forward(
        [fed[name] for name in SEES], [[BLOCKS.index(b) for b in row] for row in SEES.values()]
    )
    assert list(found) == ["Alice", "Bob"]
    for r, (name, blocks) in enumerate(SEES.items()):
        # [L, H, block]
        heads = np.stack([shelf.shares[r, len(fed[name]) - 1] for shelf in dense.shelves])
        expected = heads.mean(axis=(0, 1))
        assert list(found[name]) == list(blocks)
        np.testing.assert_allclose(
            list(found[name].values()), [expected[BLOCKS.index(b)] for b in blocks], atol=1e-4
        )
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, stand_in.cache), before)


def test_a_worker_that_feeds_nothing_is_left_out():
    stand_in, _, _ = session()
    tokens, _ = stand_in.pending()
    resting = types.SimpleNamespace(
        **{**vars(stand_in), "pending": lambda: (tokens, np.asarray([1, 0, 0], np.int32))}
    )
    assert list(attention_shares(resting)) == ["Bob"]


@pytest.mark.slow
def test_recording_changes_nothing_of_what_workers_write():
    problem, whole = arithmetic.make_problem(random.Random(0)).prompt(), demo.load_embedded()
    # Its first layer alone compiles sooner, and writes nonsense.
    params = {
        name: leaf
        for name, leaf in whole.params["params"].items()
        if not name.startswith("layers_") or name == "layers_0"
    }
    model = dataclasses.replace(
        whole, config=dataclasses.replace(whole.config, num_layers=1), params={"params": params}
    )

    def made() -> Workers:
        return Workers(model, problem, budget=40, passes_at_once=4, sampler=endless())

    watched, alone = made(), made()
    recorder = AttentionProbe(watched, every=10)
    for event in watched.stream():
        recorder(event)
    assert [
        event.text for event in alone.stream()
    ] and watched.result().texts == alone.result().texts
    for worker in ("Alice", "Bob"):
        passes = [m.passes for m in recorder.attention if m.worker == worker]
        assert passes == [4, 16, 28, 40]
    for mass in recorder.attention:
        assert list(mass.shares) == [
            "history",
            "Bob" if mass.worker == "Alice" else "Alice",
            mass.worker,
        ]
        assert (
            sum(mass.shares.values()) == pytest.approx(1, abs=1e-4)
            and min(mass.shares.values()) > 0
        )
    snapshot = recorder.snapshot()
    assert (
        snapshot.passes == 40 and sum(b.bytes for b in snapshot.blocks) == watched.result().kv_bytes
    )
    with pytest.raises(ValueError, match="every is 0; it must be at least 1"):
        AttentionProbe(watched, every=0)


def made_up(workers: int, history: int, steps: int, measurements: int) -> Snapshot:
    """The combined layout of any number of workers."""
    names = [f"Worker {i}" for i in range(workers)]
    layout = combined(names)
    lengths = (
        {b: 10 for b in layout.blocks}
        | {"history": history}
        | {name: steps * i for i, name in enumerate(names)}
    )
    snapshot = Snapshot.of_layout(layout, lengths)
    shares = (
        np.random.default_rng(workers)
        .dirichlet(np.ones(len(layout.sees[names[0]])), (measurements, workers))
        .tolist()
    )
    masses = tuple(
        AttentionShare(5 * i, name, dict(zip(layout.sees[name], shares[i][j], strict=True)))
        for i in range(measurements)
        for j, name in enumerate(names)
    )
    blocks = tuple(
        BlockExtent(b.name, b.offset + 20 * i, b.length, b.length + 20, b.length * 64)
        for i, b in enumerate(snapshot.blocks)
    )
    return dataclasses.replace(snapshot, passes=123, blocks=blocks, attention=masses)


SNAPSHOTS = {
    "two": made_up(2, 613, 40, 5),
    "one": made_up(1, 5, 0, 1),
    "eight": made_up(8, 16_000, 30, 3),
    "crowded": made_up(16, 100, 1, 2),
}
some_snapshot = pytest.mark.parametrize(
    "snapshot", mostly_slow(SNAPSHOTS.values(), 2), ids=SNAPSHOTS
)


@some_snapshot
def test_saved_and_loaded_is_the_same(snapshot, tmp_path):
    snapshot.save(tmp_path / "run.json")
    assert Snapshot.load(tmp_path / "run.json") == snapshot


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            None,
            r"nothing.json cannot be read .*; give a file that `jaxshare workers --save` or "
            r"Snapshot.save has written",
        ),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[1]", "is not a snapshot"),
        ('{"passes": 3}', "is not a snapshot"),
        ({"blocks": 3}, "is damaged"),
        ({"blocks": [{"name": "history"}]}, "is damaged"),
        ({"rows": []}, "is damaged"),
        ({"rows": {"Alice": [{"block": "no such block", "start": 0, "length": 1}]}}, "is damaged"),
        ({"rows": {}}, "is damaged"),
        (
            {"masses": [{"passes": 1, "worker": "Alice", "shares": {"history": "much"}}]},
            "is damaged",
        ),
        ({"passes": None}, "is damaged"),
    ],
)
def test_files_that_are_no_snapshots(content, words, tmp_path):
    file = tmp_path / "nothing.json"
    if isinstance(content, dict):
        content = json.dumps(SNAPSHOTS["two"].to_json() | content)
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        Snapshot.load(file)


@some_snapshot
def test_the_cache_picture_has_every_block_in_its_place(snapshot):
    figure = cache_picture(snapshot)
    FigureCanvasAgg(figure).draw()
    seen, arena = figure.axes
    looks: dict[str, set] = {b.name: set() for b in snapshot.blocks}

    def bars(ax) -> dict[float, list]:
        """For each height the opaque bars on it, from the left."""
        found: dict[float, list] = {}
        for bar in sorted(ax.patches, key=lambda bar: (bar.get_y(), bar.get_x())):
            if bar.get_alpha() is None:
                found.setdefault(round(bar.get_y(), 3), []).append(bar)
        return found

    drawn = list(bars(seen).values())
    assert len(drawn) == len(snapshot.rows)
    for row, bar in zip(snapshot.rows.values(), drawn, strict=True):
        assert sorted((b.get_x(), b.get_width()) for b in bar) == sorted(
            (b.start, b.length) for b in row
        )
        for b in row:
            if b.length:
                (patch,) = [p for p in bar if (p.get_x(), p.get_width()) == (b.start, b.length)]
                looks[b.block].add((to_hex(patch.get_facecolor()), patch.get_hatch()))
    (bar,) = bars(arena).values()
    assert [(b.get_x(), b.get_width()) for b in bar] == [
        (b.offset, b.length) for b in snapshot.blocks
    ]
    for b, patch in zip(snapshot.blocks, bar, strict=True):
        looks[b.name].add((to_hex(patch.get_facecolor()), patch.get_hatch()))
    assert all(len(look) == 1 for look in looks.values()) and len(
        set.union(*looks.values())
    ) == len(snapshot.blocks)
    assert [t.get_text() for t in figure.legends[0].texts] == [
        f"{b.name} ({b.length} tokens)" for b in snapshot.blocks
    ]


def overlaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool[A, B] for boxes [A, 4] and [B, 4] of x0, y0, x1, y1."""
    low, high = (
        np.maximum(a[:, None, :2], b[None, :, :2]),
        np.minimum(a[:, None, 2:], b[None, :, 2:]),
    )
    return (low < high).all(axis=-1)


@some_snapshot
def test_the_cache_picture_shows_every_start_and_none_runs_into_another(snapshot):
    figure = cache_picture(snapshot)
    FigureCanvasAgg(figure).draw()
    for ax, starts in zip(
        figure.axes,
        (
            [b.start for row in snapshot.rows.values() for b in {b.start: b for b in row}.values()],
            [b.offset for b in snapshot.blocks],
        ),
        strict=True,
    ):
        assert sorted(int(text.get_text()) for text in ax.texts) == sorted(starts)
        assert all(int(text.get_text()) == text.get_position()[0] for text in ax.texts)
        texts, bars = (
            np.asarray([a.get_window_extent().extents for a in artists])
            for artists in (ax.texts, ax.patches)
        )
        assert (
            np.array_equal(overlaps(texts, texts), np.eye(len(texts)))
            and not overlaps(texts, bars).any()
        )
        assert (texts >= 0).all() and (texts[:, 2:] <= figure.bbox.size).all()


@some_snapshot
def test_the_mass_picture_stacks_the_shares(snapshot):
    figure = attention_picture(snapshot)
    FigureCanvasAgg(figure).draw()
    for ax, name in zip(figure.axes, snapshot.names, strict=True):
        own = [m for m in snapshot.attention if m.worker == name]
        assert name in ax.get_title(loc="left") and len(ax.collections) == len(own[0].shares)
        for i, area in enumerate(ax.collections):
            outline = area.get_paths()[0].vertices
            for m in own:
                heights = outline[outline[:, 0] == m.passes, 1]
                shares = 100 * np.cumsum([0, *m.shares.values()])
                np.testing.assert_allclose(
                    [heights.min(), heights.max()], shares[i : i + 2], atol=1e-3
                )
    assert {t.get_text() for t in figure.legends[0].texts} == {b.name for b in snapshot.blocks}


def test_masses_of_a_worker_that_has_left_are_drawn():
    snapshot = dataclasses.replace(
        SNAPSHOTS["two"],
        attention=(
            *SNAPSHOTS["two"].attention,
            AttentionShare(40, "Carol", {"history": 0.25, "Carol": 0.75}),
        ),
    )
    assert [
        ax.get_title(loc="left").split(" attends")[0] for ax in attention_picture(snapshot).axes
    ] == ["What Worker 0", "What Worker 1", "What Carol"]


def test_a_worker_stays_on_top_of_one_that_joins_later():
    masses = (
        AttentionShare(0, "Worker 0", {"history": 0.5, "Worker 0": 0.5}),
        AttentionShare(4, "Worker 0", {"history": 0.5, "Carol": 0.2, "Worker 0": 0.3}),
    )
    (ax,) = attention_picture(dataclasses.replace(SNAPSHOTS["two"], attention=masses)).axes
    top = ax.collections[-1].get_paths()[0].vertices
    assert [top[top[:, 0] == passes, 1].min() for passes in (0, 4)] == pytest.approx([50, 70])


def test_shares_from_before_another_layout_are_not_shown_beside_it():
    snapshot = SNAPSHOTS["two"]
    masses = [
        AttentionShare(90, "Worker 0", {"history": 0.25, "Carol": 0.25, "Worker 0": 0.5}),
        AttentionShare(90, "Worker 1", snapshot.attention[-1].shares),
    ]
    table = probe.row_table(dataclasses.replace(snapshot, attention=(*snapshot.attention, *masses)))
    shares = list(table.columns[-1].cells)
    assert not any(shares[:5]) and all(shares[5:]) and len(shares) == 10


def inspect(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    inspect_command.add_arguments(parser)
    return inspect_command.run(parser.parse_args([str(a) for a in arguments]))


def test_inspect_prints_tables_and_writes_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    snapshot = SNAPSHOTS["two"]
    snapshot.save(tmp_path / "run.json")
    assert inspect(tmp_path / "run.json", "--out", tmp_path / "new" / "folder") == 0
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["history", "0", "613", "633", "38.3"] in lines
    assert ["all", "673", "773", "42.1"] in lines
    share = snapshot.attention[-1].shares["Worker 1"]
    assert ["Worker", "1", "633", "40", f"{share:.1%}"] in lines
    for name in ("cache.png", "mass.png"):
        assert (tmp_path / "new" / "folder" / name).read_bytes().startswith(b"\x89PNG")


def test_inspect_json_is_one_object(tmp_path, capsys):
    snapshot = dataclasses.replace(SNAPSHOTS["two"], attention=())
    snapshot.save(tmp_path / "run.json")
    assert inspect(tmp_path / "run.json", "--out", tmp_path, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("pictures") == [str(tmp_path / "cache.png")]
    assert printed == checksums.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert (tmp_path / "cache.png").is_file() and not (tmp_path / "mass.png").exists()


def test_inspect_says_what_is_wrong(tmp_path, monkeypatch):
    SNAPSHOTS["two"].save(tmp_path / "run.json")
    with pytest.raises(ValueError, match=r"the snapshot .*no\.json cannot be read"):
        inspect(tmp_path / "no.json")
    with pytest.raises(
        ValueError, match=r"--out is .*run\.json', but that is a file; give a folder"
    ):
        inspect(tmp_path / "run.json", "--out", tmp_path / "run.json")
    with pytest.raises(ValueError, match="no attention masses to draw"):
        attention_picture(dataclasses.replace(SNAPSHOTS["two"], attention=()))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxshare\[plot\]'"):
        cache_picture(SNAPSHOTS["two"])
    with pytest.raises(ValueError, match=r"pip install 'jaxshare\[plot\]'"):
        inspect(tmp_path / "run.json", "--out", tmp_path)


def test_branches_have_the_blocks_of_their_plan():
    """A tree whose prompts are listed by hand: (tokens read together, then one's own)."""
    model = one_layer()
    root, left, right, alone = [5] * 20, [6] * 30, [7] * 9, [8] * 4
    tree = [
        Branch(root, [Branch(left, n=2), Branch(right)]),
        Branch(alone),
    ]
    run = Branches(model, tree, max_new_tokens=4, share=True)
    snapshot = Snapshot.of_branches(run)
    rows = {
        name: [(each.start, each.length) for each in row] for name, row in snapshot.rows.items()
    }
    assert rows == {
        "prompt 0, no. 0": [(0, 20), (20, 30)],
        "prompt 0, no. 1": [(0, 20), (20, 30)],
        "prompt 1, no. 0": [(0, 20), (20, 9)],
        "prompt 2, no. 0": [(0, 4)],
    }
    assert sum(each.length for each in snapshot.blocks) == 20 + 30 + 9 + 4 == run.unique_tokens
    ends = [each.offset + each.length for each in snapshot.blocks]
    assert [each.offset for each in snapshot.blocks] == [0, *ends[:-1]]
    picture = cache_picture(snapshot)
    assert picture._repr_png_().startswith(b"\x89PNG"), "a notebook shows it"
    for wrong in (run, Workers(model, "1. 2 + 3", budget=16)):
        with pytest.raises(TypeError, match="is no snapshot; give Snapshot"):
            cache_picture(wrong)
    with pytest.raises(TypeError, match="is no session of workers; of a run of branches make"):
        Snapshot.of(run)
