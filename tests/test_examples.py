from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples" / "token_dropping"
NOTEBOOK = EXAMPLES / "notebook.ipynb"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lmcache_stream.testing.tiny import tiny_model

    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("name", ["sync_example.py", "async_example.py"])
def test_a_script_prints_its_answer_and_the_three_tables(name: str, model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, "--model", model],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    positions = [done.stdout.index(part) for part in ("tokens of KV", "Prefill", "Modify", "Decode")]
    assert positions == sorted(positions)
    assert done.stderr == ""


def outputs(notebook: Any) -> str:
    return "\n".join(
        output.get("text", "") or str(output.get("data", ""))
        for cell in code_cells(notebook)
        for output in cell.outputs
    )


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


async def test_the_notebook_runs_in_a_kernel(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_STREAM_EXAMPLE_MODEL", str(model))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    await nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").async_execute()
    shown = outputs(notebook)
    assert "kept" in shown
    assert "Output throughput" in shown
    assert "'kept_ratio'" in shown


def test_the_notebook_is_kept_executed_and_shows_no_error() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert not [output for cell in code_cells(notebook) for output in cell.outputs if output.output_type == "error"]
    assert "green" in outputs(notebook)
    assert "Output throughput" in outputs(notebook)
