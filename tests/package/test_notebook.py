"""Notebooks run from top to bottom, and stand in the repository with what they print and draw.

After a change, `.venv/bin/jupyter execute --inplace notebooks/NAME.ipynb` draws them again.
"""

import base64
import re

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.paths import ROOT

PICTURES = {
    "cache_layouts": 12,
    "workers_from_first_principles": 1,
    "hydragen": 1,
    "agent_search": 2,
}
"""The pictures of each notebook."""
MOST_BYTES = 2**20


def read(name: str):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def outputs(notebook) -> list:
    return [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]


def printed(notebook) -> str:
    streams = [output for output in outputs(notebook) if output.output_type == "stream"]
    assert {output.name for output in streams} == {"stdout"}
    return "".join(output.text for output in streams)


def pictures(notebook) -> list[bytes]:
    return [
        base64.b64decode(output.data["image/png"])
        for output in outputs(notebook)
        if "image/png" in output.get("data", {})
    ]


def run(name: str):
    """A notebook with the outputs of a run; raises where a cell does."""
    notebook = read(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    # No folders of kernels: what is left is the interpreter that runs the tests.
    manager = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    NotebookClient(notebook, km=manager, timeout=300).execute(cleanup_kc=True)
    drawn = pictures(notebook)
    assert len(drawn) == len({*drawn}) == PICTURES[name]
    assert all(picture.startswith(b"\x89PNG") for picture in drawn)
    return notebook


@pytest.mark.slow
def test_layouts_are_drawn():
    printed(run("cache_layouts"))


@pytest.mark.slow
def test_workers_by_hand_write_what_the_library_writes():
    """The notebook asserts it; the texts are those that are committed."""
    name = "workers_from_first_principles"
    found = printed(run(name))
    assert found == printed(read(name))
    assert found.count("the same by hand and by the library") == 3


@pytest.mark.slow
def test_hydragen_s_decomposition_is_exact():
    differences = re.findall(r"largest difference: (\S+)", printed(run("hydragen")))
    by_hand, library = map(float, differences)
    assert by_hand < 1e-14 and library < 1e-5


@pytest.mark.slow
def test_a_search_finds_what_a_single_path_does_not_always_find():
    results = re.findall(r"^[0-9]+ (.*)$", printed(run("agent_search")), re.MULTILINE)
    alone, searched = results[:12], results[12:]
    right = "47 + 38 = 85, 85 - 16 = 69, 69 * 7 = 483"
    assert 0 < alone.count(right) < 12 and searched == [right] * 12


@pytest.mark.parametrize("name", PICTURES)
def test_a_notebook_is_committed_with_its_outputs_and_small(name):
    notebook, path = read(name), ROOT / "notebooks" / f"{name}.ipynb"
    assert path.stat().st_size < MOST_BYTES and len(pictures(notebook)) == PICTURES[name]
    assert printed(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)]


def test_all_notebooks_are_run():
    assert {path.stem for path in (ROOT / "notebooks").iterdir()} == {*PICTURES}
