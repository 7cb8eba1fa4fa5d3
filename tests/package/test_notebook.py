"""The notebook runs from top to bottom, and stands in the repository with its pictures.

After a change, `.venv/bin/jupyter execute --inplace notebooks/cache_layouts.ipynb` draws them
again.
"""

import base64

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.paths import ROOT

NOTEBOOK = ROOT / "notebooks" / "cache_layouts.ipynb"
PICTURES = 12


def outputs(notebook) -> list:
    return [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]


def pictures(notebook) -> list[bytes]:
    return [
        base64.b64decode(output.data["image/png"])
        for output in outputs(notebook)
        if "image/png" in output.get("data", {})
    ]


@pytest.mark.slow
def test_the_notebook_runs_and_draws_its_pictures():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = pictures(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    # No folders of kernels: what is left is the interpreter that runs the tests.
    manager = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    # raises where a cell does
    NotebookClient(notebook, km=manager, timeout=300).execute(cleanup_kc=True)
    assert {output.name for output in outputs(notebook) if output.output_type == "stream"} == {
        "stdout"
    }
    drawn = pictures(notebook)
    assert len(drawn) == len(committed) == PICTURES
    assert len(set(drawn)) == PICTURES and all(picture.startswith(b"\x89PNG") for picture in drawn)


def test_the_notebook_is_small_enough_to_look_at():
    assert NOTEBOOK.stat().st_size < 2**20
