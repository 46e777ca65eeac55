"""What pyproject.toml and the Makefile promise."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import lmcache_stream

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == lmcache_stream.__version__
    assert importlib.metadata.version("lmcache-stream") == lmcache_stream.__version__


def test_every_requirement_says_its_lowest_version() -> None:
    extras = PROJECT["optional-dependencies"]
    for line in [*PROJECT["dependencies"], *(line for extra in extras.values() for line in extra)]:
        assert re.match(r"[\w.-]+(\[[\w,-]+\])?>=\d+(\.\d+)*(;.*)?$", line), line


def test_every_script_and_entry_point_loads() -> None:
    points = importlib.metadata.distribution("lmcache-stream").entry_points
    assert "lmcache-stream" in points.names
    for point in points:
        assert point.load() is not None


@pytest.mark.parametrize("python", ["false", "/does/not/exist"])
def test_make_says_which_python_to_take(python: str, tmp_path: Path) -> None:
    """`false` stands for a python that finds itself too old."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(
        ["make", "-C", tmp_path, "run", f"PYTHON={python}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert f"{python} is missing or older than 3.11: make PYTHON=python3.11 run" in done.stderr
    assert not (tmp_path / ".venv").exists()
