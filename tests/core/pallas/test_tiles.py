"""Tiles of the GPU kernels fit a GPU, and measured ones override the table."""

import dataclasses
import itertools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare.pallas import chosen_tiles, tiles
from jaxshare.pallas.chosen_tiles import Key, choose_mosaic, choose_triton, use_tiles
from jaxshare.pallas.device import H200, Device
from jaxshare.pallas.tiles import MosaicTiles, TritonTiles
from jaxshare.paths import cache_folder, write_json

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
LATENT = 576
"""Entries of a key that has its value in it."""
QUERIES = (1, 4, 16, 17, 64, 512, 2047, 2048, 8192, 10**6)
DEVICES = {
    Device("A100", 80, 108): 166_912,
    Device("A10", 86, 72): 101_376,
    Device("L40S", 89, 142): 101_376,
    H200: 232_448,
    Device("unheard of", 125, 100): 101_376,
}
"""Devices with the bytes of shared memory that a program may have there, by the programming guide;
the smallest for an unknown one."""


def mosaic_buffers(choice: MosaicTiles, dim: int) -> int:
    """Bytes of everything that the kernel keeps in shared memory, buffer by buffer."""
    columns = 64 if dim % 64 == 0 else dim
    half = np.dtype(np.float16)
    buffers = [
        np.empty((choice.query_stages, 2, 64, dim), half),
        np.empty((choice.stages, choice.tile, dim), half),
        np.empty((choice.stages, choice.tile, dim), half),
        np.empty((2, 64, columns), np.float32),
        np.empty((2, 2, 64), np.float32),
        # the last are barriers
        np.empty(2 * choice.query_stages + 4 * choice.stages + 2, np.int64),
    ]
    return sum(-(-buffer.nbytes // 128) * 128 for buffer in buffers)


def code_buffers(choice: MosaicTiles, dim: int) -> int:
    """Bytes of all that is kept where the cache has codes, buffer by buffer."""
    columns = dim if dim % 64 else 64 if dim <= 128 else 32
    ring, arrays = choice.code_stages + choice.stages, 1 if dim == LATENT else 2
    buffers = [
        *[np.empty((choice.stages, choice.tile, dim), np.float16)] * arrays,
        *[np.empty((choice.code_stages, choice.tile, dim), np.int8)] * arrays,
        *[np.empty((ring, choice.tile), np.float32)] * arrays,
    ]
    if dim > 192:  # two warpgroups share the queries; weights, and a factor of each query
        buffers += [
            np.empty((choice.query_stages, 64, dim), np.float16),
            np.empty((64, choice.tile), np.float16),
            np.empty(64, np.float32),
        ]
    else:
        buffers += [
            np.empty((choice.query_stages, 2, 64, dim), np.float16),
            np.empty((2, 64, columns), np.float32),
            np.empty((2, 2, 64), np.float32),
        ]
    # barriers; converted latents have three that they are full
    barriers = 2 * choice.query_stages + 2 * arrays * ring + 2
    buffers.append(np.empty(barriers + 2 * choice.stages * (dim == LATENT), np.int64))
    return sum(-(-buffer.nbytes // 128) * 128 for buffer in buffers)


def triton_buffers(choice: TritonTiles, dim: int) -> int:
    """An upper bound of the same, heads padded to a power of two or, of latents, cut into powers of
    two."""
    if dim == LATENT:
        keys = np.empty((choice.num_stages, choice.tile, dim), np.float16)
        return keys.nbytes + np.empty((choice.span, dim), np.float16).nbytes
    columns = next(power for power in (64, 128, 256) if power >= dim)
    stage = np.empty((2, choice.tile, columns), np.float16)
    return choice.num_stages * stage.nbytes + np.empty((choice.span, columns), np.float16).nbytes


def test_mosaic_tiles_fit_a_hopper_gpu():
    for dim in HEAD_DIMS:
        found = tiles.candidates_mosaic(H200, dim, 8)
        assert len(set(found)) == len(found) >= 1
        overlaps = {each.overlap for each in found}
        assert overlaps == ({True, False} if dim < 256 else {True})
        for choice in [
            *found,
            *(choose_mosaic(H200, dim, 8, queries, "bfloat16") for queries in QUERIES),
        ]:
            assert mosaic_buffers(choice, dim) <= 232_448
            assert choice.tile % 64 == 0 and choice.stages >= 2
            # Scores, weights and results of 64 queries leave 128 threads a quarter of their 240
            # registers each.
            assert 64 * (choice.tile + choice.tile // 2 + dim) / 128 <= 180


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_mosaic_tiles_of_codes_fit_a_hopper_gpu(dtype):
    for dim, queries in itertools.product((*HEAD_DIMS, LATENT), QUERIES):
        choice = choose_mosaic(H200, dim, 8, queries, dtype)
        assert code_buffers(choice, dim) <= tiles.mosaic_bytes(choice, dim, codes=True) <= 232_448
        # One is under way while another is converted.
        assert choice.code_stages >= 2
        # Of wide heads the warpgroup that makes scores has 128 columns of results.
        columns = dim if dim <= 192 else 128
        assert 64 * (choice.tile + choice.tile // 2 + columns) / 128 <= 160


def test_tiles_measured_for_codes_are_for_codes_alone(folder):
    found = {dtype: choose_mosaic(H200, 128, 8, 8, dtype) for dtype in ("bfloat16", "int8")}
    assert found["bfloat16"] != found["int8"]
    measured = MosaicTiles(64, 1, 2, 4)
    keep(folder, {"NVIDIA H200": {Key("mosaic_gpu", 128, 8, 8, "int8"): measured}})
    assert choose_mosaic(H200, 128, 8, 8, "int8") == measured
    assert choose_mosaic(H200, 128, 8, 8, "bfloat16") == found["bfloat16"]
    # What would not fit is not taken.
    large = MosaicTiles(64, 4, 2, 6)
    keep(folder, {"NVIDIA H200": {Key("mosaic_gpu", 128, 8, 8, "int8"): large}})
    assert choose_mosaic(H200, 128, 8, 8, "int8") == found["int8"]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.kind)
def test_triton_tiles_fit(device):
    for dim, queries in itertools.product((*HEAD_DIMS, LATENT), QUERIES):
        found, built_in = (
            tiles.candidates_triton(device, dim, queries),
            choose_triton(device, dim, 8, queries, "bfloat16"),
        )
        assert built_in in found and len(set(found)) == len(found) >= 2
        for choice in found:
            assert triton_buffers(choice, dim) <= DEVICES[device]
            # Programs that run on a multiprocessor at once share its shared memory, which is no
            # smaller than that of one program.
            at_once = choice.items_per_multiprocessor
            assert (
                at_once >= 1
                and at_once * triton_buffers(choice, dim) <= DEVICES[device]
                and at_once * choice.num_warps <= 16
            )
        assert max(choice.span for choice in found) <= max(16, 2 * queries)


def test_mosaic_tiles_of_latents_fit_a_hopper_gpu():
    found = tiles.candidates_mosaic(H200, LATENT, 8)
    assert len(set(found)) == len(found) >= 1
    for choice in [*found, *(choose_mosaic(H200, LATENT, 16, n, "bfloat16") for n in QUERIES)]:
        half = np.dtype(np.float16)
        buffers = [
            np.empty((choice.query_stages, 64, LATENT), half),
            np.empty((choice.stages, choice.tile, LATENT), half),
            np.empty((64, choice.tile), half),
            np.empty(64, np.float32),
            np.empty(2 * choice.query_stages + 2 * choice.stages + 2, np.int64),
        ]
        assert sum(-(-buffer.nbytes // 128) * 128 for buffer in buffers) <= 232_448
        assert choice.tile % 64 == 0 and choice.stages >= 2
        # Half of the results of 64 queries, and scores, in the registers of 128 threads.
        assert 64 * (choice.tile + choice.tile // 2 + 256) / 128 <= 180


def test_many_queries_get_larger_tiles():
    assert (
        choose_mosaic(H200, 128, 8, 8192, "bfloat16").tile
        > choose_mosaic(H200, 128, 8, 64, "bfloat16").tile
    )
    assert [
        choose_triton(H200, 128, 8, queries, "bfloat16").span for queries in (1, 16, 512, 8192)
    ] == [16, 16, 64, 128]


@pytest.mark.parametrize("choose", [choose_mosaic, choose_triton])
def test_other_head_dims_are_refused(choose):
    with pytest.raises(
        NotImplementedError,
        match="the head dim is 72, but there are tiles for 64, 80, 96, 128, 192, 256",
    ):
        choose(H200, 72, 1, 1, "bfloat16")


@pytest.mark.parametrize(
    ("kind", "values", "wrong"),
    [
        (MosaicTiles, (32, 2, 1), "tile"),
        (MosaicTiles, (64, 0, 1), "stages"),
        (MosaicTiles, (64, 2, 3), "query_stages"),
        (MosaicTiles, (64.0, 2, 1), "tile"),
        (MosaicTiles, (64, True, 1), "stages"),
        (MosaicTiles, (64, 2, 1, 1, 1), "overlap"),
        (TritonTiles, (8, 64, 4, 2), "span"),
        (TritonTiles, (48, 64, 4, 2), "span"),
        (TritonTiles, (16, 100, 4, 2), "tile"),
        (TritonTiles, (16, 64, 3, 2), "num_warps"),
        (TritonTiles, (16, 64, 4, 2, 0), "items_per_multi"),
    ],
)
def test_tiles_that_make_no_sense(kind, values, wrong):
    with pytest.raises(ValueError, match=f"^{wrong}"):
        kind(*values)


MOSAIC, TRITON = MosaicTiles(64, 2, 1), TritonTiles(32, 32, 4, 2)


def test_use_tiles_is_for_its_own_backend_and_for_what_is_traced_in_it():
    usual = choose_mosaic(H200, 128, 8, 8, "bfloat16"), choose_triton(H200, 128, 8, 8, "bfloat16")
    seen = []

    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        seen.append(
            (choose_mosaic(H200, 128, 8, 8, x.dtype), choose_triton(H200, 128, 8, 8, x.dtype))
        )
        return x

    x = jnp.zeros(2, jnp.bfloat16)
    traced(x)
    with use_tiles(MOSAIC):
        traced(x)
        with use_tiles(TRITON):
            traced(x)
            with use_tiles(None):
                traced(x)
        traced(x)
    traced(x)
    assert seen == [usual, (MOSAIC, usual[1]), (usual[0], TRITON)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, and no file read yet."""
    monkeypatch.setenv("JAXSHARE_CACHE", str(tmp_path))
    chosen_tiles.read_tiles.cache_clear()
    yield tmp_path
    chosen_tiles.read_tiles.cache_clear()


def keep(folder, measured) -> None:
    write_json(folder / "tiles.json", chosen_tiles.encode_tiles(measured))
    chosen_tiles.read_tiles.cache_clear()


def test_measured_tiles_are_used_for_such_calls_on_such_a_device(folder):
    keep(
        folder,
        {
            "NVIDIA H200": {
                Key("mosaic_gpu", 128, 8, 512, "bfloat16"): MOSAIC,
                Key("triton", 128, 8, 512, "bfloat16"): TRITON,
            }
        },
    )
    usual = choose_mosaic(Device("NVIDIA H100", 90, 132), 128, 8, 512, "bfloat16")
    assert usual != MOSAIC
    # up to half and twice as many, as powers of two
    for queries in (129, 256, 300, 512, 513, 1024):
        assert choose_mosaic(H200, 128, 8, queries, jnp.bfloat16) == MOSAIC
        assert choose_triton(H200, 128, 8, queries, jnp.dtype("bfloat16")) == TRITON
    for dim, group, queries, dtype in [
        (128, 8, 128, "bfloat16"),
        (128, 8, 1025, "bfloat16"),
        (128, 8, 512, "float16"),
        (128, 4, 512, "bfloat16"),
        (96, 8, 512, "bfloat16"),
    ]:
        assert choose_mosaic(H200, dim, group, queries, dtype) != MOSAIC
        assert choose_triton(H200, dim, group, queries, dtype) != TRITON
    with use_tiles(MosaicTiles(64, 3, 1)):
        assert choose_mosaic(H200, 128, 8, 512, "bfloat16") == MosaicTiles(64, 3, 1)


def test_the_bucket_of_the_call_counts_for_more_than_its_neighbours(folder):
    sizes = {queries: MosaicTiles(64, 2 + i, 1) for i, queries in enumerate((256, 512, 1024))}
    keep(
        folder,
        {
            "NVIDIA H200": {
                Key("mosaic_gpu", 128, 8, queries, "float16"): found
                for queries, found in sizes.items()
            }
        },
    )
    for queries, found in sizes.items():
        assert choose_mosaic(H200, 128, 8, queries, "float16") == found


def test_what_no_longer_fits_is_not_used(folder):
    usual = choose_mosaic(H200, 256, 8, 8, "bfloat16")
    keep(
        folder, {"NVIDIA H200": {Key("mosaic_gpu", 256, 8, 8, "bfloat16"): MosaicTiles(128, 4, 2)}}
    )
    assert choose_mosaic(H200, 256, 8, 8, "bfloat16") == usual


def test_the_file_reads_back_as_it_was_written(folder):
    measured = {
        kind: {
            Key(backend, dim, group, queries, dtype): choice
            for dim, group, queries, dtype in itertools.product(
                HEAD_DIMS, (1, 16), (1, 4096), ("bfloat16", "float16")
            )
            for backend, choice in [
                ("mosaic_gpu", MOSAIC),
                ("triton", dataclasses.replace(TRITON, num_stages=dim)),
            ]
        }
        for kind in ("NVIDIA H200", 'NVIDIA "RTX" 4090/ö')
    }
    keep(folder, measured)
    assert chosen_tiles.read_tiles(folder / "tiles.json") == measured


ENTRY = {
    "backend": "mosaic_gpu",
    "head_dim": 128,
    "group": 8,
    "queries": 8,
    "dtype": "bfloat16",
    "tiles": dataclasses.asdict(MOSAIC),
}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "its version is None"),
        ("{}", "its version is None"),
        ('{"version": 3, "devices": {}}', "is 3, not 2"),
        ('{"version": 1, "devices": {}}', "its version is 1, not 2"),
        ('{"version": 2}', "devices"),
        ('{"version": 2, "devices": 3}', "wrong"),
        *[
            (json.dumps({"version": 2, "devices": {"NVIDIA H200": [ENTRY | wrong]}}), reason)
            for wrong, reason in [
                (
                    {"tiles": {"tile": 100, "stages": 2, "query_stages": 1}},
                    "tile of MosaicTiles cannot be 100",
                ),
                ({"tiles": {"tile": "64", "stages": 2, "query_stages": 1}}, "wrong"),
                ({"tiles": {"tile": 64}}, "stages"),
                ({"tiles": None}, "wrong"),
                ({"backend": "xla"}, "xla"),
                ({"backend": "triton"}, "stages"),
                ({"colour": "red"}, "colour"),
                ({"dtype": []}, "wrong"),
            ]
        ],
    ],
)
def test_a_file_that_cannot_be_read_is_one_warning(folder, text, reason):
    usual = choose_mosaic(H200, 128, 8, 8, "bfloat16")
    (folder / "tiles.json").write_text(text, encoding="utf-8")
    chosen_tiles.read_tiles.cache_clear()
    words = (
        r"the tiles in .*tiles\.json cannot be read .*; built-in ones are used until "
        "`jaxshare tune` writes it again"
    )
    with pytest.warns(UserWarning, match=words) as said:
        assert choose_mosaic(H200, 128, 8, 8, "bfloat16") == usual
    assert reason in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_mosaic(H200, 128, 8, 8, "bfloat16") == usual


def test_a_file_that_is_a_folder_is_a_warning_too(folder):
    (folder / "tiles.json").mkdir()
    with pytest.warns(UserWarning, match="cannot be read"):
        choose_mosaic(H200, 128, 8, 8, "bfloat16")


def test_the_file_is_read_once(folder):
    keep(folder, {"NVIDIA H200": {Key("mosaic_gpu", 128, 8, 8, "bfloat16"): MOSAIC}})
    assert choose_mosaic(H200, 128, 8, 8, "bfloat16") == MOSAIC
    (folder / "tiles.json").unlink()
    assert choose_mosaic(H200, 128, 8, 8, "bfloat16") == MOSAIC
    chosen_tiles.read_tiles.cache_clear()
    assert choose_mosaic(H200, 128, 8, 8, "bfloat16") != MOSAIC


def test_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSHARE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("JAXSHARE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert cache_folder().name.lower() == "jaxshare" and cache_folder() != tmp_path


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    file = tmp_path / "new" / "file.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert json.loads(file.read_text(encoding="utf-8")) == {"a": 1}
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_json(tmp_path / "folder", {})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.json"] and not [
        *tmp_path.glob("tmp*")
    ]
