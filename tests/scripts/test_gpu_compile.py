"""The check that compiles for a GPU where none is: what it refuses, how it reads what compilers
write, and a run where its packages are."""

import dataclasses
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxshare.pallas.tiles import shared_memory
from scripts.gpu import compile as check
from scripts.gpu import (
    compiler,
    listings,
    numbers,
    programs,
    prompt_report,
    prompts,
    targets,
    thunks,
)
from scripts.gpu import hlo as xla_text
from scripts.gpu import results as kept
from tests.helpers import TINY
from tests.paths import ROOT


def missing() -> str | None:
    """What keeps this environment from compiling for a GPU."""
    try:
        compiler.Toolchain.find()
    except compiler.MissingError as error:
        return str(error)
    return None


compiles = pytest.mark.skipif((REASON := missing()) is not None, reason=str(REASON))


# What it refuses.


def install(monkeypatch, **found: str | None) -> None:
    """Makes packages look installed in a version, or not at all; jax is 0.12.0."""
    versions = {
        "jax": "0.12.0",
        **{name.replace("_", "-"): version for name, version in found.items()},
    }

    def version(name: str) -> str:
        if versions.get(name) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def ptxas(folder: Path, said: str) -> Path:
    """A program that says which CUDA it is of."""
    folder.mkdir(parents=True)
    program = folder / "ptxas"
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, {said}, V0.0'\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def no_ptxas(monkeypatch, tmp_path):
    """No ptxas anywhere: not on PATH, in $CUDA_HOME, in the usual folder or among Python's
    packages."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(compiler, "CUDA_FOLDER", tmp_path / "cuda")
    monkeypatch.setattr(compiler, "_wheel_folders", lambda: iter(()))


@pytest.mark.parametrize(
    "found, names",
    [
        ({}, ["jax-cuda13-plugin is not installed", "make gpu-compile"]),
        ({"jax_cuda13_plugin": "0.12.0"}, ["jax-cuda13-pjrt is not installed", "make gpu-compile"]),
        (
            {"jax_cuda13_plugin": "0.11.2", "jax_cuda13_pjrt": "0.11.2"},
            ["plugin is 0.11.2", "jax 0.12.0", "jax-cuda13-plugin==0.12.0"],
        ),
    ],
    ids=["no plugin", "no pjrt", "another version"],
)
def test_it_ends_with_code_2_and_one_sentence_where_a_package_is_missing(
    monkeypatch, capsys, found, names
):
    install(monkeypatch, **found)
    assert check.main([]) == 2
    out, said = capsys.readouterr()
    assert out == "" and said.startswith("scripts.gpu.compile: ") and said.count("\n") == 1
    assert all(name in said for name in names), said


def test_it_ends_with_code_2_where_there_is_no_ptxas(monkeypatch, capsys, no_ptxas):
    install(monkeypatch, jax_cuda13_plugin="0.12.0", jax_cuda13_pjrt="0.12.0")
    assert check.main([]) == 2
    said = capsys.readouterr().err
    assert (
        "ptxas" in said
        and "CUDA_HOME" in said
        and "nvidia-cuda-nvcc" in said
        and said.count("\n") == 1
    )


def test_it_takes_the_first_ptxas_that_is_new_enough(monkeypatch, no_ptxas, tmp_path):
    old = ptxas(tmp_path / "old", "release 12.9")
    monkeypatch.setenv("PATH", f"{old.parent}{os.pathsep}/bin")
    with pytest.raises(compiler.MissingError, match=r"13\.0 or newer; .*ptxas is of CUDA 12\.9"):
        compiler.find_ptxas()
    last = ptxas(tmp_path / "cuda" / "bin", "release 13.1")
    assert compiler.find_ptxas() == (last, "13.1")
    home = ptxas(tmp_path / "home" / "bin", "release 13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert compiler.find_ptxas() == (home, "13.0")


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["--backends", "cudnn"], ["--backends", "'cudnn'", "mosaic_gpu, triton, xla"]),
        (["--parts", "kernels,speed"], ["--parts", "'speed'", "kernels, steps, devices, prompts"]),
        (["--output", "/no/such/folder/file.json"], ["--output", "a folder that exists"]),
        (["--target", "v100"], ["--target", "'v100'", "h200", "b200", "a100"]),
        (["--target", "b200", "--parts", "cold"], ["--parts", "'cold'", "b200", "kernels, steps"]),
    ],
)
def test_arguments_that_it_does_not_take(capsys, arguments, names):
    with pytest.raises(SystemExit) as ended:
        check.main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and all(name in said for name in names), said


# What the compilers write.


def test_registers_spills_and_static_shared_memory_of_each_kernel():
    found = listings.read_ptxas(
        textwrap.dedent("""\
        ptxas info    : (C7513) wgmma.mma_async instructions are serialized due to others in the function 'block_attention'
        ptxas info    : 0 bytes gmem
        ptxas info    : Compiling entry function 'block_attention' for 'sm_90a'
        ptxas info    : Function properties for block_attention
            24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
        ptxas info    : Used 168 registers, used 5 barriers, 24 bytes cumulative stack size, 272 bytes smem
        ptxas info    : Compile time = 91.412 ms
        ptxas info    : Compiling entry function 'merge_pieces' for 'sm_90a'
        ptxas info    : Function properties for merge_pieces
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        ptxas info    : Used 40 registers, used 0 barriers
        """)
    )
    assert found == {
        "block_attention": {
            "registers": 168,
            "spill_bytes": 20,
            "static_shared_bytes": 272,
            "serialized": 1,
        },
        "merge_pieces": {
            "registers": 40,
            "spill_bytes": 0,
            "static_shared_bytes": 0,
            "serialized": 0,
        },
    }


def test_matrix_instructions_of_each_kernel():
    ptx = (
        ".visible .entry attend(\n) { wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1};\n"
        "wgmma.commit_group.sync.aligned; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%r2}; }\n.visible .entry merge(\n) { mma.sync.aligned.m16n8k16 {%r3}; }\n"
    )
    assert listings.read_products(ptx) == {
        "attend": {"wgmma": 2, "mma": 0, "tcgen05": 0},
        "merge": {"wgmma": 0, "mma": 1, "tcgen05": 0},
    }
    assert listings.read_products("") == {}


def test_shared_memory_of_launches():
    found = listings.read_launches(
        textwrap.dedent("""\
        001: kCustomKernel [source       | next=002 (1) ] loop_broadcast_fusion grid: [2, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
        002: kCustomKernel [prev=001 (1) | next=003 (1) ] block_attention grid: [264, 1, 1] threads: [128, 1, 1]  shared_memory: 98304 bytes
        003: kWhile        [prev=002 (1) | sink         ] while.1
        """)
    )
    assert found == {"block_attention": 98304, "loop_broadcast_fusion": 0}


def test_shared_memory_that_a_mosaic_kernel_asks_for():
    dump = (
        "%c7_i32 = arith.constant 7 : i32\n%size = arith.constant 214144 : i32\ngpu.launch "
        "blocks(%a, %b, %c) in (%d = %e) threads(%f) in (%g = %h) dynamic_shared_memory_size %size "
        "{\n"
    )
    assert listings.read_dynamic_shared(dump) == 214144
    with pytest.raises(ValueError, match="does not say how much shared memory"):
        listings.read_dynamic_shared(dump.replace("%size = ", "%other = "))


# What the optimised HLO says: a loop over a cache of 64 x 128 entries.

HLO = """\
HloModule jit_run, is_scheduled=true, input_output_alias={{ {{}}: (0, {{}}, may-alias) }}

%append (param_0: f32[64,128], param_1: f32[1,128], param_2: s32[]) -> f32[64,128] {{
  %param_0 = f32[64,128]{{1,0}} parameter(0)
  %param_1 = f32[1,128]{{1,0}} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
{fused}
}}

%body (state: (s32[], f32[64,128], f32[1,128])) -> (s32[], f32[64,128], f32[1,128]) {{
  %state = (s32[], f32[64,128]{{1,0}}, f32[1,128]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %cache = f32[64,128]{{1,0}} get-tuple-element(%state), index=1
  %new = f32[1,128]{{1,0}} get-tuple-element(%state), index=2
{looped}
  %next = s32[] fusion(%i), kind=kLoop, calls=%add_one
  ROOT %out = (s32[], f32[64,128]{{1,0}}, f32[1,128]{{1,0}}) tuple(%next, %appended, %new)
}}

%condition (state.1: (s32[], f32[64,128], f32[1,128])) -> pred[] {{
  %state.1 = (s32[], f32[64,128]{{1,0}}, f32[1,128]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %last = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %last), direction=LT
}}

ENTRY %main (x: f32[64,128], y: f32[1,128]) -> f32[64,128] {{
  %x = f32[64,128]{{1,0}} parameter(0)
  %y = f32[1,128]{{1,0}} parameter(1)
  %begin = s32[] constant(0)
{entry}
  %init = (s32[], f32[64,128]{{1,0}}, f32[1,128]{{1,0}}) tuple(%begin, %held, %y)
  %loop = (s32[], f32[64,128]{{1,0}}, f32[1,128]{{1,0}}) while(%init), condition=%condition, body=%body
  ROOT %done = f32[64,128]{{1,0}} get-tuple-element(%loop), index=1
}}
"""
IN_PLACE = (
    "  ROOT %update = f32[64,128]{1,0} dynamic-update-slice(%param_0, %param_1, %param_2, %zero.1)"
)
FUSED = '  %appended = f32[64,128]{1,0} fusion(%cache, %new, %i), kind=kLoop, calls=%append, metadata={op_name="layers_0/append"}'
NAMED = "  %held = f32[64,128]{1,0} bitcast(%x)"
KERNEL = (
    '  %appended = f32[64,128]{1,0} custom-call(%cache, %new), custom_call_target="mosaic_gpu_v2"'
)


def hlo(*, fused=IN_PLACE, looped=FUSED, entry=NAMED) -> str:
    return HLO.format(fused=fused, looped=looped, entry=entry)


def test_an_update_in_place_is_no_copy_of_the_cache():
    assert xla_text.large_results(hlo(), 64 * 128) == {}
    scattered = (
        "  ROOT %update = f32[64,128]{1,0} scatter(%param_0, %param_2, %param_1), to_apply=%region"
    )
    assert xla_text.large_results(hlo(fused=scattered), 64 * 128) == {}
    assert (
        xla_text.large_results(
            hlo(looped=f"{KERNEL}, output_to_operand_aliasing={{{{}}: (0, {{}})}}"), 64 * 128
        )
        == {}
    )


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("copy", {"entry": "  %held = f32[64,128]{1,0} copy(%x)"}),
        (
            "copy",
            {
                "entry": "  %start = (f32[64,128]{1,0}, f32[64,128]{1,0}, u32[]) copy-start(%x)\n"
                "  %held = f32[64,128]{1,0} copy-done(%start)"
            },
        ),
        (
            "copy",
            {
                "looped": "  %kept = f32[64,128]{1,0} copy(%cache)\n"
                + FUSED.replace("%cache", "%kept")
            },
        ),
        (
            "transpose",
            {
                "fused": "  %turned = f32[128,64]{1,0} bitcast(%param_0)\n"
                "  ROOT %update = f32[64,128]{1,0} transpose(%turned), dimensions={1,0}"
            },
        ),
        (
            "multiply",
            {
                "fused": "  %scaled = f32[64,128]{1,0} multiply(%param_0, %param_0)\n"
                + IN_PLACE.replace("%param_0", "%scaled")
            },
        ),
        (
            "gather",
            {
                "fused": "  %read = f32[64,128]{1,0} gather(%param_0, %param_2)\n"
                "  ROOT %update = (f32[64,128]{1,0}, f32[1,128]{1,0}) tuple(%read, %param_1)",
                "looped": "  %both = (f32[64,128]{1,0}, f32[1,128]{1,0}) fusion(%cache, %new, %i), "
                "kind=kLoop, calls=%append\n  %appended = f32[64,128]{1,0} "
                "get-tuple-element(%both), index=0",
            },
        ),
        ("custom-call", {"looped": KERNEL}),
    ],
    ids=[
        "at the start",
        "asynchronous",
        "in the loop",
        "transposed",
        "all of it rewritten by an update",
        "gathered",
        "by a kernel",
    ],
)
def test_what_writes_the_whole_cache_is_counted(kind, changes):
    assert xla_text.large_results(hlo(**changes), 64 * 128) == {kind: 1}
    assert xla_text.large_results(hlo(**changes), 64 * 128 + 1) == {}


def test_branches_and_calls_are_read_too():
    text = textwrap.dedent("""\
        %yes (a: f32[64,128]) -> f32[64,128] {
          %a = f32[64,128]{1,0} parameter(0)
          ROOT %a.1 = f32[64,128]{1,0} copy(%a)
        }

        %no (b: f32[64,128]) -> f32[64,128] {
          %b = f32[64,128]{1,0} parameter(0)
          ROOT %b.1 = f32[64,128]{1,0} negate(%b)
        }

        %inner (c: f32[64,128], d: s32[]) -> f32[64,128] {
          %c = f32[64,128]{1,0} parameter(0)
          %d = s32[] parameter(1)
          ROOT %e = f32[64,128]{1,0} conditional(%d, %c, %c), branch_computations={%yes, %no}
        }

        ENTRY %main (x: f32[64,128], y: s32[]) -> f32[64,128] {
          %x = f32[64,128]{1,0} parameter(0)
          %y = s32[] parameter(1)
          ROOT %z = f32[64,128]{1,0} call(%x, %y), to_apply=%inner
        }
        """)
    assert xla_text.large_results(text, 64 * 128) == {"copy": 1, "negate": 1}


def test_launches_of_a_pass_are_told_apart_by_layer():
    def kernel(name: str, module: str) -> str:
        return f'  %{name} = f32[1,128]{{1,0}} fusion(%new), kind=kLoop, calls=%k, metadata={{op_name="jit(run)/{module}/k"}}'

    layers = [
        kernel(f"k{layer}.{n}", f"layers_{layer}/attention")
        for layer, number in enumerate((5, 2, 2))
        for n in range(number)
    ]
    text = hlo(looped="\n".join([kernel("plan", "plan"), *layers, kernel("head", "head"), FUSED]))
    # Layer 0 has its append besides: what it has more than the others, all layers share. The loop's
    # counter belongs to none either.
    assert numbers.pass_launches(text, 3) == {"layer": 2, "outside": 4 + 3, "loops": 0}


def test_a_decode_step_names_the_layer_of_each_instruction():
    """Layers are traced once, and the names are what tells them apart in a compiled program."""
    step = programs.Step("2 rows", 2, "shared", 16, 1, False)
    decoding = programs.decoding(step, "xla", TINY, history=64)
    lowered = jax.jit(decoding.function).lower(*decoding.arguments).as_text(debug_info=True)
    assert decoding.layers == 2
    assert all(f"/layers_{i}/" in lowered for i in range(decoding.layers))


def collective(name: str, kind: str, shape: str, axes: str, module: str) -> str:
    groups = f"mesh['data'=1,'tensor'=2,'kv'=2] {{{axes}}}"
    return (
        f"  %{name} = {shape} {kind}(%new), channel_id=1, replica_groups={groups}, use_global_device_ids=true, "
        f'metadata={{op_name="jit(run)/while/body/{module}/psum"}}'
    )


def test_collectives_are_named_by_what_they_do_over_which_axes():
    lines = [
        collective("a", "all-reduce", "f32[4,1,16,129]{3,2,1,0}", "'kv'", "layers_0/attention"),
        collective(
            "b", "all-gather-start", "((f32[4,16000]{0,1}), f32[4,32000]{0,1})", "'tensor'", "head"
        ),
        "  %c = f32[4,32000]{0,1} all-gather-done(%b)",
        collective("d", "reduce-scatter", "(f32[8]{0}, bf16[2,3]{1,0})", "'tensor','kv'", "head"),
        "  %e = f32[8]{0} collective-permute(%new), source_target_pairs={{0,1}}",
        KERNEL,
    ]
    found = xla_text.collectives(lines)
    assert [str(one) for one in found] == [
        "all-reduce over kv",
        "all-gather over tensor",
        "reduce-scatter over tensor,kv",
        "collective-permute over devices that have no name",
    ]
    assert [one.elements for one in found] == [4 * 16 * 129, 4 * 32000, 8, 8]


def test_what_devices_send_is_told_apart_by_layer():
    """Collectives of a pass are those of the loop that holds the layers; the largest may be
    anywhere."""
    layers = [
        collective(f"sum{i}.{n}", "all-reduce", "f32[1,128]{1,0}", "'tensor'", f"layers_{i}/{name}")
        for i in range(3)
        for n, name in enumerate(("attention/o", "mlp/down"))
    ]
    kernels = [
        f'{KERNEL.replace("appended", f"k{i}.{n}")}, metadata={{op_name="layers_{i}/attention"}}'
        for i in range(3)
        for n in range(2)
    ]
    embedded = collective("embedded", "all-reduce", "f32[1,128]{1,0}", "'tensor'", "embed")
    moved = collective("moved", "all-reduce", "f32[16,128]{1,0}", "'kv'", "move")
    text = hlo(looped="\n".join([embedded, *layers, *kernels, FUSED]), entry=f"{moved}\n{NAMED}")
    program = compiler.Program(text, (), temp_bytes=10, alias_bytes=64 * 128 * 4)
    decoding = SimpleNamespace(
        layers=3, arena_elements=64 * 128, layer_bytes=64 * 128 * 8, cache_bytes=64 * 128 * 8 * 3
    )
    found = numbers.device_numbers(program, decoding)
    assert found["sent"] == {
        "layer": {"all-reduce over tensor": 2},
        "outside": {"all-reduce over tensor": 1},
        "largest_of_layers_keys": 0.25,
    }
    assert found["kernel_calls"] == 2 and found["launches"]["layer"] == 4


# What its host works through.

LISTED = """\
000: kCommandBuffer [source       | next=004 (1) ]
    001: kCopy         [source       | next=002 (1)] kCopy
    002: kConditional  [prev=001 (1) | sink        ]
      false_branch:
        003: kCustomKernel [source | sink] add_fusion grid: [1, 1, 1] threads: [4, 1, 1]
      true_branch:
        No thunks.
004: kWhile         [prev=000 (1) | next=010 (1) ]
condition:
    005: kCustomKernel [source | sink] less_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=008 (1)]
        006: kWhile        [source       | sink        ]
condition:
            No thunks.          body:
            007: kGemm         [source | sink]
    008: kConditional  [prev=000 (1) | sink        ]
      false_branch:
        009: kCustomCall   [source | sink] host
010: kCopy         [prev=004 (1) | sink ] kCopy
"""


def test_what_a_host_works_through_in_a_dispatch():
    listed = thunks.read_list(LISTED)
    assert [launch.kind for launch in listed if launch.in_graph] == [
        *("kCopy", "kConditional", "kCustomKernel", "kWhile", "kGemm")
    ]
    assert listed[-2].around == ("kWhile", "kConditional") and listed[-1].around == ()
    # A loop and a branch are the host's, with a comparison, a call and a copy outside of graphs.
    host = thunks.HostWork(graphs=2, waits=2, alone=3, in_graphs=3)
    assert thunks.HostWork.of(listed) == host
    program = compiler.Program("", (), 0, 0, launches=LISTED)
    assert numbers.host_work(program) == {"graphs": 2, "waits": 2, "alone": 3, "in_graphs": 3}


def test_goals_of_cold_starts():
    cold = {"backend": "triton", "name": "Llama", "error": None, "layers": 32, "kernels": 4}
    assert missed({"cold": [cold]}) == []
    assert missed({"cold": [{**cold, "kernels": 64}]}) == [
        "triton, Llama: kernels of attention lowered for 32 layers"
    ]


BESIDE = """
  %gemm_fusion_dot.1 = f32[64,512] fusion(%p), metadata={op_name="layers_1/attention/o.in_pieces/dot_general"}
  %sum-start.1 = (f32[64,512], f32[64,512]) all-reduce-start(%gemm_fusion_dot.1), metadata={op_name="layers_1/attention/o.in_pieces/psum"}
  %gemm_fusion_dot.2 = bf16[2,64,256] fusion(%p), metadata={op_name="layers_1/mlp/dot_general"}
  %loop_multiply_fusion = bf16[64,256] fusion(%gemm_fusion_dot.2), kind=kLoop
  %gemm_fusion_dot.3 = f32[64,512] fusion(%p), metadata={op_name="layers_1/mlp/down.in_pieces/dot_general"}
  %sum-done.1 = f32[64,512] all-reduce-done(%sum-start.1)
  %gemm_fusion_dot.4 = f32[64,512] fusion(%p)
  %sum-start.2 = (f32[64,512], f32[64,512]) all-reduce-start(%gemm_fusion_dot.4), metadata={op_name="layers_0/mlp/down.in_pieces/psum"}
  %sum-done.2 = f32[64,512] all-reduce-done(%sum-start.2)
  %psum.7 = f32[64,512] all-reduce(%gemm_fusion_dot.4), metadata={op_name="layers_1/mlp/down.in_pieces/psum"}
"""


def test_products_beside_what_is_sent():
    first, second = prompts.sums_of_layer(BESIDE.strip().splitlines())
    assert [line.partition(" =")[0].strip() for line in first.beside] == [
        *("%gemm_fusion_dot.2", "%gemm_fusion_dot.3")
    ]
    assert second.beside == ()
    config = dataclasses.replace(prompts.MODEL, hidden_size=512, intermediate_size=2048)
    found = prompts.sum_numbers(first, config)
    assert (found["of"], found["bytes"], found["products"]) == ("attention", 64 * 512 * 4, 2)
    # A product in two pieces of the inputs, all of which are 512, and one of an eighth of 2,048.
    flops = 2 * 64 * 256 * 512 + 2 * 64 * 512 * 256
    assert found["product_seconds"] == pytest.approx(flops / 989e12 / 0.72)
    assert found["sending_seconds"] == pytest.approx(2 * 7 / 8 * 64 * 512 * 4 / 450e9 + 12e-6)
    prompt = {"backend": "mosaic_gpu", "name": "a prompt", "error": None, "spill_bytes": 0}
    sums = [found, prompts.sum_numbers(second, config)]
    assert missed({"prompts": [{**prompt, "sums": sums[:1]}]}) == []
    assert missed({"prompts": [{**prompt, "sums": sums}]}) == [
        "mosaic_gpu, a prompt: sums of a layer without a product beside them"
    ]
    hidden = found["product_seconds"] / 2 / found["sending_seconds"]
    assert prompt_report.hidden({"sums": sums}) == pytest.approx(hidden)


def test_goals_of_sampling():
    host = {"graphs": 1, "waits": 0, "alone": 0, "in_graphs": 6}
    draw = {"name": "top-k", "error": None, "host": host, "kernels": KERNELS["kernels"]}
    assert missed({"sampling": [draw]}) == []
    spilling = [{**KERNELS["kernels"][0], "spill_bytes": 4}]
    assert missed(
        {"sampling": [{**draw, "host": {**host, "graphs": 2, "waits": 1, "alone": 3}}]}
    ) == [
        "sampling, top-k: graphs of a dispatch",
        "sampling, top-k: loops and branches of the host",
        "sampling, top-k: launches outside of graphs",
    ]
    assert missed({"sampling": [{**draw, "host": {**host, "in_graphs": 7}}]}) == [
        "sampling, top-k: launches"
    ]
    assert missed({"sampling": [{**draw, "kernels": spilling}]}) == [
        "sampling, top-k: bytes that a kernel spills"
    ]
    failed = {"name": "top-k", "error": "ValueError: no"}
    assert missed({"sampling": [failed]}) == ["sampling: programs that do not compile"]


# Results that stay.


def test_results_of_other_runs_stay_until_they_are_compiled_again(tmp_path, monkeypatch):
    file, commit = tmp_path / "results.json", "aaaaaaa"
    monkeypatch.setattr(kept, "current_commit", lambda: commit)
    one, two = ({"backend": "triton", "name": name, "error": None} for name in ("one", "two"))
    first = kept.Results(("steps", "plan"), file)
    assert not first.is_new("steps", one)
    first.add("steps", {**one, "number": 1})
    first.add("steps", {**two, "error": "it failed"})
    assert first.is_new("steps", one) and not first.is_new("plan", one)
    assert not first.is_new("steps", two)  # what failed is tried again
    file.write_text(json.dumps(first.all()))

    commit = "bbbbbbb"
    second = kept.Results(("steps", "plan"), file)
    assert not second.is_new("steps", one)
    second.add("steps", {**two, "number": 2})
    found = second.all()
    assert [*found] == ["steps"] and [r["commit"] for r in found["steps"]] == ["aaaaaaa", "bbbbbbb"]
    assert [r["number"] for r in found["steps"]] == [1, 2]
    assert all(len(r["date"]) == 10 for r in found["steps"])


def test_results_of_another_gpu_are_not_gone_on_with(tmp_path, capsys):
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"target": "NVIDIA H200", "kernels": []}))
    assert check.parse(["--resume", "--output", str(file)]).resume
    with pytest.raises(SystemExit) as exit_:
        check.parse(["--resume", "--output", str(file), "--target", "b200"])
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and "of NVIDIA H200, for NVIDIA B200" in said, said


def test_resuming_needs_a_file(capsys):
    with pytest.raises(SystemExit) as exit_:
        check.parse(["--resume"])
    assert exit_.value.code == 2 and "--output" in capsys.readouterr().err


# What the numbers are held against.

STEP = {
    "backend": "triton",
    "name": "4 workers",
    "error": None,
    "whole_cache": {},
    "temp_bytes": 10,
    "layer_bytes": 100,
    "aliased_bytes": 801,
    "cache_bytes": 800,
    "launches": {"layer": 13, "outside": 90, "loops": 0},
    "spill_bytes": 0,
}
KERNELS = {
    "backend": "triton",
    "name": "D 64",
    "error": None,
    "kernels": [
        {
            "name": "block_attention",
            "maker": "triton",
            "registers": 168,
            "spill_bytes": 0,
            "static_shared_bytes": 448,
            "dynamic_shared_bytes": 232_000,
        }
    ],
}


SENT = {
    "layer": {"all-reduce over tensor": 2, "all-reduce over kv": 2},
    "largest_of_layers_keys": 0.25,
    "outside": {"all-reduce over tensor": 5, "all-gather over tensor": 2, "all-reduce over kv": 2},
}
DEVICES = {
    **STEP,
    "name": "4 workers, tensor 2 x kv 2",
    "axes": ("tensor", "kv"),
    "moves": True,
    "sent": SENT,
    "kernel_calls": 2,
    "kernels": KERNELS["kernels"],
}


def missed(results) -> list[str]:
    return [goal.name for goal in check.all_goals(results) if not goal.met]


def test_goals():
    [kernel] = KERNELS["kernels"]
    assert missed({"kernels": [KERNELS], "steps": [STEP], "plan": [{"error": None}]}) == []
    for results, expected in [
        ({"kernels": [{**KERNELS, "kernels": [kernel, {**kernel, "spill_bytes": 4}]}]}, "spills"),
        ({"kernels": [{**KERNELS, "kernels": [{**kernel, "serialized": 1}]}]}, "wait for each"),
        (
            {"kernels": [{**KERNELS, "under_products": {"under": 3, "exponentials": 4}}]},
            "under a product",
        ),
        (
            {"kernels": [{**KERNELS, "kernels": [kernel, {**kernel, "static_shared_bytes": 449}]}]},
            "shared memory",
        ),
        (
            {
                "kernels": [
                    KERNELS,
                    {"backend": "triton", "name": "D 80", "error": "ValueError: no"},
                ]
            },
            "do not compile",
        ),
        ({"plan": [{"error": "ValueError: no"}]}, "do not compile"),
        ({"steps": [{**STEP, "whole_cache": {"copy": 2}}]}, "copies of the cache"),
        ({"steps": [{**STEP, "temp_bytes": 101}]}, "temporary memory"),
        ({"steps": [{**STEP, "aliased_bytes": 799}]}, "in place"),
        ({"steps": [{**STEP, "spill_bytes": 4}]}, "spill"),
    ]:
        [name] = missed(results)
        assert expected in name


def test_what_a_backend_declines_another_one_has_to_serve():
    declined = {"backend": "mosaic_gpu", "name": "D 72", "error": None, "declined": "head dim"}
    served = {**KERNELS, "backend": "triton", "name": "D 72"}

    def wrong(target: str, *results) -> list[str]:
        goals = check.all_goals({"kernels": results}, targets.TARGETS[target])
        return [goal.name for goal in goals if not goal.met]

    assert wrong("b200", declined, served) == []
    assert wrong("b200", declined) == ["programs that no GPU backend of ours serves"]
    appends = {**declined, "name": "D 72, appends"}  # which are compiled for mosaic_gpu alone
    assert wrong("b200", declined, appends, served) == []
    assert wrong("h200", declined, served) == ["programs that a backend declines"]


def test_goals_of_another_gpu_have_its_shared_memory():
    [kernel] = KERNELS["kernels"]
    large = {**KERNELS, "kernels": [{**kernel, "dynamic_shared_bytes": 101_377}]}
    named = [
        g.name for g in check.all_goals({"kernels": [large]}, targets.TARGETS["l40"]) if not g.met
    ]
    assert named == ["triton: bytes of shared memory of a block, most"]


@pytest.mark.parametrize(
    ("name", "architecture", "capability"),
    [("h200", "sm_90a", 90), ("b200", "sm_100a", 100), ("l40", "sm_89", 89), ("a100", "sm_80", 80)],
)
def test_targets_are_described_to_each_compiler(name, architecture, capability):
    target = targets.TARGETS[name]
    assert target.architecture == architecture and target.device.capability == capability
    assert shared_memory(target.device) == target.shared[0]
    major, minor = divmod(capability, 10)
    assert f"{{ major: {major} minor: {minor} }}" in target.description
    assert f'"{target.kind}"' in target.description


def test_goals_of_several_devices():
    [kernel] = KERNELS["kernels"]
    assert (
        missed(
            {"devices": [DEVICES, {**DEVICES, "backend": "xla", "kernels": [], "kernel_calls": 0}]}
        )
        == []
    )
    for changes, expected in [
        ({"error": "ValueError: no"}, "do not compile"),
        ({"temp_bytes": 101}, "temporary memory"),
        ({"kernels": [{**kernel, "spill_bytes": 4}]}, "a kernel spills"),
        ({"kernel_calls": 1.5}, "kernels of ours a layer"),
        (
            {"axes": ("tensor",), "moves": False, "sent": {**SENT, "outside": {}}},
            "collectives a layer",
        ),
        (
            {"sent": {**SENT, "layer": {"all-reduce over tensor": 2, "all-reduce over kv": 1}}},
            "collectives a layer",
        ),
        (
            {"sent": {**SENT, "layer": {**SENT["layer"], "all-gather over kv": 0.5}}},
            "collectives a layer",
        ),
        (
            {"sent": {**SENT, "outside": {**SENT["outside"], "all-gather over kv": 1}}},
            "outside of layers",
        ),
        (
            {"sent": {**SENT, "outside": {**SENT["outside"], "all-reduce over tensor": 6}}},
            "outside of layers",
        ),
        ({"moves": False}, "outside of layers"),
        ({"sent": {**SENT, "largest_of_layers_keys": 0.26}}, "largest array sent"),
    ]:
        [name] = missed({"devices": [{**DEVICES, **changes}]})
        assert expected in name


# A real run, in a process of its own: the environment has to be set before JAX is imported.


def run(*command: str) -> subprocess.CompletedProcess[str]:
    # What is compiled there is looked at, so it is optimised, which other tests go without.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"
    }
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )


@compiles
@pytest.mark.slow
def test_a_decode_step_and_the_plan():
    done = run(
        "-m", "scripts.gpu.compile", "--backends", "mosaic_gpu", "--parts", "steps,plan", "--json"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["ok"] and all(goal["met"] for goal in report["goals"])
    assert (
        "H200" in report["target"]
        and report["versions"]["jax-cuda13-plugin"] == report["versions"]["jax"]
    )
    assert [step["name"] for step in report["steps"]] == ["4 workers", "64 branches"]
    for step in report["steps"]:
        assert 0 < step["temp_bytes"] < step["layer_bytes"] and step["launches"]["layer"] > 0
        assert step["cache_bytes"] == 8 * step["layer_bytes"] <= step["aliased_bytes"]
    assert all(plan["launches"] > 0 for plan in report["plan"])


@compiles
@pytest.mark.slow
def test_decode_steps_for_a_gpu_without_wgmma():
    done = run(
        *("-m", "scripts.gpu.compile", "--target", "b200", "--backends", "mosaic_gpu"),
        *("--parts", "steps", "--json"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["ok"] and report["target"] == "NVIDIA B200"
    assert all(step["launches"]["layer"] < 20 for step in report["steps"])


@compiles
@pytest.mark.slow
def test_a_decode_step_on_four_devices():
    done = run("-m", "scripts.gpu.compile", "--backends", "triton", "--parts", "devices", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["ok"] and all(goal["met"] for goal in report["goals"])
    split, spread = report["devices"]
    assert (split["axes"], spread["axes"]) == (["tensor"], ["tensor", "kv"])
    assert split["sent"]["layer"] == {"all-reduce over tensor": 2}
    assert spread["sent"]["layer"] == {"all-reduce over tensor": 2, "all-reduce over kv": 2}
    for step in (split, spread):
        # A quarter of the heads, or half the heads and half the tokens: 73,728 tokens of 8 kv
        # heads, keys and values in bfloat16.
        assert step["layer_bytes"] == 73728 * 8 * 128 * 2 * 2 // 4
        # Attention's two, sums with their norms, and the thresholds of a draw whose logits are
        # spread over devices.
        assert {kernel["name"]: kernel["maker"] for kernel in step["kernels"]} == dict.fromkeys(
            ("block_attention", "merge_pieces", "add_and_normalise", "truncation_bounds"), "triton"
        )


@compiles
@pytest.mark.slow
def test_a_prompt_on_eight_devices_is_sent_beside_products():
    done = run(
        "-m", "scripts.gpu.compile", "--backends", "mosaic_gpu", "--parts", "prompts", "--json"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for prompt in json.loads(done.stdout)["prompts"]:
        # Of each half of the tokens after attention and after the MLP, in float32.
        assert [each["of"] for each in prompt["sums"]] == ["attention", "attention", "MLP", "MLP"]
        assert {each["bytes"] for each in prompt["sums"]} == {prompt["tokens"] // 2 * 8192 * 4}
        assert all(each["products"] for each in prompt["sums"])


COMPILED = """
import dataclasses, functools, json, sys, tempfile
from pathlib import Path
from scripts.gpu import compile, compiler, hlo

tools = compiler.Toolchain.find()
with tempfile.TemporaryDirectory() as folder:
    tools.prepare(Path(folder))
    chip = compiler.Compiler(tools, Path(folder))
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from scripts.gpu import programs
    from jaxshare.pallas.device import H200, assume_device

    found = {}
    case = programs.Case(128, 4, "bfloat16", *programs.PASSES[0])
    with assume_device(H200):
        for backend in programs.GPU_BACKENDS:
            function, arguments = programs.attention(case, backend)
            kernels = chip.compile(function, *arguments).kernels
            found[backend] = [dataclasses.asdict(kernel) for kernel in kernels]
        wide = programs.Case(128, 4, "bfloat16", *programs.PASSES[4])
        found["wide"] = compile.kernels_of(chip, *programs.attention(wide, "mosaic_gpu"))

    # A kernel that wants a given number of bytes of shared memory.
    def wants(size):
        def kernel(x_ref, y_ref, scratch):
            scratch[:128] = x_ref[...]
            y_ref[...] = scratch[:128]
        return plgpu.kernel(kernel, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), kernel_name="wants",
                            scratch_types=[plgpu.SMEM((size // 4,), jnp.float32)])
    line = jax.ShapeDtypeStruct((128,), jnp.float32)
    found["asked"] = chip.compile(wants(65536), line).kernels[0].dynamic_shared_bytes
    try:
        chip.compile(wants(262144), line)
    except Exception as error:
        found["too large"] = str(error)

    # Of a cache that is given away a part is updated in place; one that is kept has to be copied.
    cache, new = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 4096, 128), (8, 1, 128)))
    def append(cache, new):
        return cache.at[:, 7:8].set(new)
    for name, donated in (("given", 0), ("kept", ())):
        program = chip.compile(append, cache, new, donate_argnums=donated)
        found[name] = [dict(hlo.large_results(program.text, 8 * 4096 * 128)), program.alias_bytes]
    print(json.dumps(found))
"""


@compiles
@pytest.mark.slow
def test_what_is_read_of_real_programs():
    done = run("-c", COMPILED)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for backend, maker in (("mosaic_gpu", "mosaic"), ("triton", "triton")):
        names = {kernel["name"]: kernel for kernel in found[backend]}
        assert len(names) == 2 and all(
            kernel["maker"] == maker and 0 < kernel["registers"] <= 255 for kernel in names.values()
        )
        # Tiles of 128 columns of keys and of values, two of each at least.
        [attention] = [kernel for name, kernel in names.items() if "attention" in name]
        assert (
            attention["static_shared_bytes"] + attention["dynamic_shared_bytes"] >= 4 * 16 * 128 * 2
        )
    # Where two products overlap all exponentials are made under one of them.
    assert not any(kernel["serialized"] for kernel in found["wide"]["kernels"])
    under = found["wide"]["under_products"]
    assert under["under"] == under["exponentials"] >= 32
    assert 65536 <= found["asked"] < 65536 + 4096
    assert "shared memory" in found["too large"].lower() or "smem" in found["too large"].lower()
    assert found["given"] == [{}, 8 * 4096 * 128 * 2]
    copies, aliased = found["kept"]
    assert sum(copies.values()) == 1 and aliased == 0
