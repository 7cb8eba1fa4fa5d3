"""scripts.bench.kernels: kernels are counted once each, by what they are for."""

import json

import pytest

from scripts.bench import kernels

PROGRAM = """HloModule jit_f, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %inner = f32[4]{0} add(%p, %p)
}

%body (s: (f32[4])) -> (f32[4]) {
  %s = (f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%s), index=0
  %norm.1 = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(run_layer)/Layer/mlp_norm/mul"}
  %call.2 = f32[4] custom-call(%norm.1), custom_call_target="jaxshare.products.f", metadata={op_name="jit(run_layer)/Layer/mlp/ffi_call"}
  %copy.3 = f32[4]{0} copy(%call.2), metadata={op_name="jit(run_layer)/Layer/mlp/add"}
  %add.4 = f32[4]{0} fusion(%copy.3), kind=kLoop, calls=%fused, metadata={op_name="jit(run_layer)/Layer/add"}
  ROOT %t = (f32[4]{0}) tuple(%add.4)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %sort.5 = f32[4]{0} sort(%a), to_apply=%less, metadata={op_name="a/sort"}
  ROOT %loop = (f32[4]{0}) while(%sort.5), condition=%cond, body=%body
}
"""


def test_what_kernels_are_for():
    assert kernels.purposes(PROGRAM) == {
        "norm.1": "in layers: norms",
        "call.2": "in layers: projections",
        "copy.3": "in layers: copies",
        "add.4": "in layers: mlp and residuals",
        "sort.5": "outside of layers",
        "loop": "outside of layers",
    }


@pytest.mark.slow
def test_both_sides_of_the_embedded_model(tmp_path, capsys):
    output = tmp_path / "kernels.json"
    assert kernels.main(["--quick", "--turns", "1", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    (sides,) = report["results"].values()
    for side in sides.values():
        assert side["ran_a_layer"] > 5 and sum(side["kernels"].values()) > 50
    # Each layer calls each of our kernels at least once, and XLA alone none of them.
    ran = [side["ran_a_pass"].get("in layers: append", 0) for side in sides.values()]
    assert ran == [4, 0]
    assert "kernels run a layer" in capsys.readouterr().out


def test_turns_are_checked(capsys):
    with pytest.raises(SystemExit) as raised:
        kernels.main(["--turns", "0"])
    assert raised.value.code == 2 and "--turns is 0" in capsys.readouterr().err
