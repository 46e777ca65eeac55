from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_stream.bench import compare
from lmcache_stream.errors import UsageError
from tests.bench.results import RECORDED
from tests.bench.test_report import edited, plain, quality_file


def row(rows: list[compare.Row], label: str) -> compare.Row:
    (found,) = (row for row in rows if row.label == label)
    return found


def run(*arguments: str | Path) -> None:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    compare.run(parser.parse_args([str(argument) for argument in arguments]))


def test_ratios_are_the_second_over_the_first() -> None:
    first, second = plain(), plain()
    second["output_throughput"] = 2 * first["output_throughput"]
    rows = compare.compare(first, second)
    assert row(rows, "Output throughput (tok/s)").ratio == pytest.approx(2.0)
    assert row(rows, "TTFT mean (ms)").ratio == pytest.approx(1.0)
    assert row(rows, "ITL p99 (ms)").interval is None


def test_the_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(400):
        results: list[dict[str, Any]] = []
        for scale in (100.0, 150.0):
            values = [scale * rng.gammavariate(4, 0.25) for _ in range(60)]
            results.append(
                {"completed": 60, "mean_ttft_ms": float(np.mean(values)), "std_ttft_ms": float(np.std(values))}
            )
        interval = row(compare.compare(*results), "TTFT mean (ms)").interval
        assert interval is not None
        covered += interval[0] <= 1.5 <= interval[1]
    assert 0.92 <= covered / 400 <= 0.98


def test_results_without_spread_have_no_interval() -> None:
    one = {"completed": 1, "mean_ttft_ms": 5.0, "std_ttft_ms": 0.0}
    assert row(compare.compare(one, one), "TTFT mean (ms)").interval is None


def test_a_ratio_over_nothing_is_none() -> None:
    assert row(compare.compare({"failed": 0}, {"failed": 3}), "Failed requests").ratio is None


def test_edits_are_compared() -> None:
    rows = compare.compare(plain(), edited())
    assert row(rows, "Output throughput with edit time").second == pytest.approx(10.0)


def test_shown_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(plain()))
    run(RECORDED, path, "--html", tmp_path / "both.html")
    shown = capsys.readouterr().out
    assert "vllm-bench-serve.json" in shown
    assert " to " in shown
    assert "B: generate" in (tmp_path / "both.html").read_text()


def test_files_of_one_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.json").write_text(json.dumps(plain()))
    run(tmp_path / "a" / "x.json", tmp_path / "b" / "x.json", "--html", tmp_path / "both.html")
    assert "b/x.json" in (tmp_path / "both.html").read_text()


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(UsageError, match=r"x\.json is no result"):
        run(RECORDED, tmp_path / "x.json")


def test_quality_is_drawn_into_the_page(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(edited()))
    files = (tmp_path / "a.json", tmp_path / "b.json", "--quality", quality_file(tmp_path))
    with pytest.raises(UsageError, match="--html"):
        run(*files)
    run(*files, "--html", tmp_path / "page.html")
    assert "Quality by kept ratio" in (tmp_path / "page.html").read_text()


def test_edits_while_decoding_are_compared_where_both_have_them() -> None:
    first, second = edited(), edited()
    assert "Edits while decoding" not in [row.label for row in compare.compare(first, second)]
    first["lmcache_stream"]["edits_while_decoding"] = {"completed": 4, "seconds": 2.0}
    second["lmcache_stream"]["edits_while_decoding"] = {"completed": 6, "seconds": 1.0}
    rows = compare.compare(first, second)
    assert row(rows, "Edits while decoding").ratio == pytest.approx(1.5)
    assert row(rows, "Time of edits while decoding (s)").ratio == pytest.approx(0.5)
