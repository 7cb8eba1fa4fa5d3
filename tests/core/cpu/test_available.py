"""Where kernels of the CPU must be available: the other tests of this folder skip where they are not."""

import os

import llvmlite.binding as llvm
import pytest

from jaxshare import cpu


def test_they_are_available_where_they_are_promised():
    if os.environ.get("JAXSHARE_CPU_KERNELS"):
        pytest.skip("JAXSHARE_CPU_KERNELS is set, and may turn them off")
    has = llvm.get_host_cpu_features()
    if not all(has.get(name) for name in ("avx2", "fma", "f16c")):
        pytest.skip("this processor has no AVX2")
    assert cpu.available()
