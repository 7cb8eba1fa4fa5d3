"""Decode steps of published models with quantised weights: the models, what their packed weights
take, and how what a program reads is counted."""

import dataclasses
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxshare.pallas.dense_products_triton import DenseTiles
from jaxshare.pallas.product_tiles import ProductTiles
from scripts.gpu import hlo, programs, quantised_report, sass
from scripts.gpu import quantised_steps as steps

INT4, INT8, FP8 = steps.FORMS


def parameters(name: str, layers: int):
    """The shapes of a model's parameters, with some of its layers."""
    config = dataclasses.replace(steps.MODELS[name], num_layers=layers)
    return programs.decoding(steps.STEPS[1], "xla", config, history=64).arguments[0]


def of_all_layers(name: str, count) -> float:
    """What parameters have, counted of one layer and of two: all layers are alike."""
    one, two = (count(parameters(name, layers)) for layers in (1, 2))
    return one + (steps.MODELS[name].num_layers - 1) * (two - one)


@pytest.mark.parametrize(("name", "published"), [("Llama-3.1-8B", 8.03e9), ("QwQ-32B", 32.76e9)])
def test_models_have_the_parameters_that_are_published(name, published):
    number = of_all_layers(name, lambda params: sum(a.size for a in jax.tree.leaves(params)))
    assert number == pytest.approx(published, rel=1e-3)


def test_packed_weights_are_as_large_as_published():
    """QwQ-32B-AWQ is 19.3 GB, where a zero takes four bits in place of eight."""

    def stored(params) -> float:
        packed = steps.packed_layers(params, INT4)
        zeros = sum(each.zeros.size for each in steps.matrices_of(packed))
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(packed)) - zeros / 2

    assert of_all_layers("QwQ-32B", stored) / 1e9 == pytest.approx(19.3, rel=5e-3)
    # packed as `load` packs them: qkv, o, gate and up, down
    assert len(steps.matrices_of(steps.packed_layers(parameters("QwQ-32B", 2), INT4))) == 2 * 4


def test_shapes_of_a_form():
    int4, int8, fp8 = (steps.packed((24, 256), form) for form in (INT4, INT8, FP8))
    assert (int4.codes.shape, int4.scales.shape, int4.zeros.shape) == ((24, 128), (24, 2), (24, 2))
    assert (int8.codes.shape, int8.scales.shape, int8.zeros) == ((24, 256), (24, 1), None)
    assert (fp8.codes.dtype, fp8.scales.shape) == (jnp.float8_e4m3fn, (24, 2))
    for each in (int4, int8, fp8):
        assert each.shape == (24, 256)
        each.check_shapes("it")


TEXT = textwrap.dedent("""\
    ENTRY %main (x: bf16[4,256]) -> f32[4,24] {
      %x = bf16[4,256]{1,0} parameter(0)
      %w = (u8[24,128]{1,0}, f16[24,2]{1,0}) parameter(1)
      %codes = u8[24,128]{1,0} get-tuple-element(%w), index=0
      %scales = f16[24,2]{1,0} get-tuple-element(%w), index=1
      %call = f32[1,4,24]{2,1,0} custom-call(%x, %codes, %scales), {call}
      %wide = f32[24,128]{1,0} convert(%codes), metadata={op_name="layers_1/o"}
      ROOT %y = f32[4,24]{1,0} bitcast(%call)
    }
    """).replace(
    "{call}",
    'custom_call_target="__gpu$xla.gpu.triton", operand_layout_constraints={bf16[4,256]{1,0}}, '
    'metadata={op_name="layers_1/dense_products"}',
)


def test_bytes_of_operands():
    [lines] = hlo.computations(TEXT).values()
    read = hlo.operand_bytes(TEXT)
    by_name = {line.split(" = ")[0].split()[-1]: read(line) for line in lines}
    assert by_name["%call"] == [("bf16", 2048), ("u8", 3072), ("f16", 96)]
    assert by_name["%codes"] == [("u8", 3072), ("f16", 96)]
    assert by_name["%x"] == []


def test_reads_by_the_kernel_and_by_others():
    [lines] = hlo.computations(TEXT).values()
    assert steps.matrix_reads(TEXT, lines, INT4) == {"by_kernel": 3168, "otherwise": 3072}
    without = [line for line in lines if "convert" not in line]
    assert steps.matrix_reads(TEXT, without, INT4) == {"by_kernel": 3168, "otherwise": 0}


def test_predicted_times():
    config, step = steps.MODELS["QwQ-32B"], steps.STEPS[1]
    packed = steps.packed_layers(parameters("QwQ-32B", 1), INT4)
    matrices = steps.matrices_of(packed, 0)
    found = steps.predict(config, step, matrices, 1000)
    # 4.32 TB/s, and 1.5 us for each launch.
    assert found["bytes_in_bfloat16"] == pytest.approx(62.4e9, rel=1e-3)
    assert found["seconds"]["weights"] == pytest.approx(16.33e9 / 4.32e12, rel=1e-3)
    assert found["seconds"]["launches"] == pytest.approx(1.5e-3)
    assert found["seconds"]["all"] < found["seconds_in_bfloat16"]


STEP = {
    "backend": "mosaic_gpu",
    "name": "a model",
    "rows": 4,
    "error": None,
    "measured": {
        "packed_bytes": 100,
        "read_bytes": 104,
        "read_otherwise": 0,
        "large_writes": {},
        "temp_bytes": 50,
        "largest_matrix_in_bfloat16": 50,
        "aliased": 1.0,
        "layer": {"others": 8},
        "launches": 80,
        "spill_bytes": 0,
        "kernels": [],
    },
    "predicted": {
        "seconds": {"weights": 1.0, "all": 2.0},
        "seconds_in_bfloat16": 3.0,
        "bytes_in_bfloat16": 300,
    },
}
ALONE = {
    "backend": "triton",
    "name": "a product",
    "error": None,
    "matrix_in_bfloat16": 100,
    "loop": {"products": 8, "per_number": 2.94},
    "predicted": {"memory": 1e-6, "instructions": 2e-6},
}


def missed(**changes) -> list[str]:
    step = {**STEP, "measured": {**STEP["measured"], **changes}}
    return [goal.name for goal in quantised_report.goals_of_quantised(step) if not goal.met]


def test_goals():
    assert missed() == []
    for changes, expected in [
        ({"read_bytes": 106}, "bytes read"),
        ({"read_bytes": 94}, "bytes read"),
        ({"read_otherwise": 1}, "read by other"),
        ({"large_writes": {"convert": 1}}, "smallest matrix"),
        ({"temp_bytes": 51}, "temporary"),
        ({"aliased": 0.5}, "in place"),
        ({"spill_bytes": 4}, "spill"),
    ]:
        [name] = missed(**changes)
        assert expected in name
    for temporary, met in ((50, True), (51, False)):
        alone = {**ALONE, "temp_bytes": temporary}
        assert [g.met for g in quantised_report.goals_of_quantised(alone)] == [met, True]
    without = {**ALONE, "temp_bytes": 0, "loop": {"products": 0}}
    assert [g.met for g in quantised_report.goals_of_quantised(without)] == [True, False]


def test_the_tables_name_each_program():
    kernel = dict(registers=71, spill_bytes=0, static_shared_bytes=1, dynamic_shared_bytes=2)
    alone = {**ALONE, "temp_bytes": 0, "kernels": [kernel]}
    text = quantised_report.quantised_text([alone, STEP])
    assert "a product" in text and "a model" in text and "71" in text and "2.94" in text


def test_tiles_are_those_of_the_kernel_that_serves():
    served = steps.packed((256, 512), INT4)
    assert isinstance(steps.tiles_of(served, 4), ProductTiles)
    assert isinstance(steps.tiles_of(served, 4, "triton"), DenseTiles)
    assert isinstance(steps.tiles_of(steps.packed((100, 512), INT4), 4), DenseTiles)


SASS = textwrap.dedent("""\
            .section        .text.one
    .L_x_0:
            /*0000*/                   MOV R1, c[0x0][0x28] ;
            /*0010*/              @!P1 BRA `(.L_x_2) ;
    .L_x_1:
            /*0020*/                   PRMT R2, R1, 0x4140, R3 ;
            /*0030*/                   HGMMA.64x8x16.F32.BF16 R24, R28, gdesc[UR20], RZ, !UPT ;
            /*0040*/               @P1 BRA `(.L_x_1) ;
            /*0050*/               @P2 BRA `(.L_x_0) ;
    .L_x_2:
            /*0060*/                   EXIT ;
    """)


def test_loops_of_machine_code():
    """From a label to a branch back to it; branches forwards are none."""
    small, large = sorted(sass.loops(SASS), key=len)
    assert [line.split()[0] for line in small] == ["PRMT", "HGMMA.64x8x16.F32.BF16", "@P1"]
    assert len(large) == 6
    # Eight numbers of a matrix for each wgmma and thread.
    loop = sass.ProductLoop(len(small), 1, {})
    assert loop.per_number == 3 / 8


OVERLAPPING = textwrap.dedent("""
    .L_x_0:
            /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0 ;
            /*0010*/                   HGMMA.64x128x16.F32.BF16 R88, R56, gdesc[UR12].tnspB, R88, gsb0 ;
            /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
            /*0030*/                   MUFU.EX2 R24, R24 ;
            /*0040*/                   MUFU.EX2 R25, R25 ;
            /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
            /*0060*/                   MUFU.EX2 R26, R26 ;
            /*0070*/               @P1 BRA `(.L_x_0) ;
    """)


def test_exponentials_under_a_product(monkeypatch):
    """Of programs that wait for all but one product; others are not disassembled."""
    wait = "wgmma.wait_group.sync.aligned 1;"
    monkeypatch.setattr(sass, "disassembled", lambda _, ptx: ptx.removeprefix(wait))

    def found(*programs: str) -> sass.UnderProducts | None:
        return sass.under_products(Path("ptxas"), programs)

    assert found(wait + OVERLAPPING) == found(wait + SASS, wait + OVERLAPPING) == (2, 3)
    assert found(wait + OVERLAPPING.replace("gsb0, 0x1", "gsb0, 0x0")) is None
    assert found(wait + SASS) is None and found(OVERLAPPING) is None and found() is None
