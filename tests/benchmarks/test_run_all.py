from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DATE = "2026-01-02T03:04:05+00:00"


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("run_all")


def result(**more: Any) -> dict[str, Any]:
    machine = {
        "cpu": "a CPU",
        "cores": 2,
        "memory_gib": 23.5,
        "system": "Linux 6",
        "python": "3.11.7",
        "packages": {"aiohttp": "3.14.5"},
    }
    rows = [{"client": "ours | theirs", "us": 3.14159, "n": 1000}, {"client": "other", "us": 12345.6, "x": None}]
    return {
        "key": 1,
        "rows": rows,
        "notes": [r"A note with \1."],
        "repeats": 5,
        "command": "python bench_rpc.py --json",
        "machine": machine,
        **more,
    }


def script(folder: Path, text: str) -> Path:
    path = folder / "bench_it.py"
    path.write_text(text)
    return path


def test_last_line_is_the_result(run_all: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = (
        "import json, sys\nprint('a table')\nprint(json.dumps({'args': sys.argv[1:]}))\nprint('late', file=sys.stderr)"
    )
    assert run_all.run(script(tmp_path, text), ["--x"]).result == {"args": ["--json", "--x"]}
    assert "a table" in capfd.readouterr().out


def test_what_cannot_run_here_is_left_out_and_what_fails_is_told(run_all: ModuleType, tmp_path: Path) -> None:
    skipped = run_all.run(script(tmp_path, 'print(\'{"skipped": "no GPU"}\')'))
    assert (skipped.left_out, skipped.failed) == ("no GPU", None)
    failed = run_all.run(script(tmp_path, "print('{\"a\": 1}')\nraise SystemExit('no server')"))
    assert (failed.result, failed.failed) == (None, "no server")
    assert run_all.run(script(tmp_path, "raise SystemExit(3)")).failed == "exit code 3"


def test_a_result_of_another_machine_stays(run_all: ModuleType) -> None:
    nothing: dict[str, Any] = {"results": {}, "left_out": {}}
    here = run_all.merged(nothing, {"bench_cuda_lanes.py": run_all.Outcome(left_out="no GPU")}, DATE)
    assert here == {"results": {}, "left_out": {"bench_cuda_lanes.py": "no GPU"}}
    there = run_all.merged(here, {"bench_cuda_lanes.py": run_all.Outcome(result=result())}, DATE)
    assert there == {"results": {"bench_cuda_lanes.py": {"date": DATE, **result()}}, "left_out": {}}
    assert run_all.merged(there, {"bench_cuda_lanes.py": run_all.Outcome(left_out="no GPU")}, "later") == there
    both = run_all.merged(there, {"bench_sse.py": run_all.Outcome(result=result())}, DATE)
    assert list(both["results"]) == ["bench_sse.py", "bench_cuda_lanes.py"]


def test_tables_stand_between_their_markers(run_all: ModuleType) -> None:
    page = "# Page\n<!-- bench_rpc.py -->\nold\n<!-- end of bench_rpc.py -->\nText.\n"
    results = {"results": {"bench_rpc.py": {"date": DATE, **result()}}, "left_out": {"bench_kv.py": "no server"}}
    written = run_all.with_tables(page, results)
    assert run_all.with_tables(written, results) == written
    assert "| client | us | n | x |\n|---|--:|--:|--:|\n| ours \\| theirs | 3.14 | 1,000 |  |\n" in written
    assert "| other | 12,346 |  |  |" in written
    assert r"A note with \1." in written
    assert "`python bench_rpc.py --json`, medians of 5 interleaved rounds, 2026-01-02; a CPU, 2 cores" in written
    assert "old" not in written
    assert written.endswith("<!-- end of bench_rpc.py -->\nText.\n")


def test_the_page_shows_what_the_scripts_printed(run_all: ModuleType) -> None:
    page = (BENCHMARKS / "README.md").read_text()
    for name in run_all.SCRIPTS:
        assert page.count(f"<!-- {name} -->") == page.count(f"<!-- end of {name} -->") == 1
    if run_all.RESULTS.exists():
        assert run_all.with_tables(page, json.loads(run_all.RESULTS.read_text())) == page


def test_every_script_takes_the_options_of_a_quick_run(run_all: ModuleType) -> None:
    for name, options in run_all.SCRIPTS.items():
        source = (BENCHMARKS / name).read_text() + (BENCHMARKS / "common.py").read_text()
        known = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
        assert {option for option in options.split() if option.startswith("--")} <= known, name
