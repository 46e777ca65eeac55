from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.bench.conftest import small_model  # noqa: F401  (a fixture)
from tests.examples.conftest import EXAMPLES

NOTEBOOK = EXAMPLES / "notebook_sync.ipynb"
PLOTS = 3


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: Any) -> str:
    return "\n".join(
        output.get("text", "")
        or str({kind: text for kind, text in output.get("data", {}).items() if "image" not in kind})
        for cell in code_cells(notebook)
        for output in cell.outputs
    )


def pictures(notebook: Any) -> int:
    return sum("image/png" in output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs)


async def test_it_runs_in_a_kernel(
    small_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LMCACHE_STREAM_EXAMPLE_MODEL", str(small_model))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    await nbclient.NotebookClient(notebook, timeout=170, kernel_name="python3").async_execute()
    shown = outputs(notebook)
    assert "kept" in shown
    assert "Output throughput" in shown
    assert "Kept ratio" in shown
    assert pictures(notebook) == PLOTS


def test_it_is_kept_executed_and_shows_no_error() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert not [output for cell in code_cells(notebook) for output in cell.outputs if output.output_type == "error"]
    assert "green" in outputs(notebook)
    assert "Output throughput" in outputs(notebook)
    assert pictures(notebook) == PLOTS
