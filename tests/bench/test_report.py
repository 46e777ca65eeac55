from __future__ import annotations

import html.parser
import io
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream.bench import quality
from lmcache_stream.bench.quality_lines import read_quality
from lmcache_stream.bench.report import render_report, tables
from lmcache_stream.bench.svg import INK, chart
from lmcache_stream.errors import UsageError
from lmcache_stream.plots import plot_latencies
from tests.bench.results import RECORDED, about, finished, options, trace
from tests.bench.test_quality import small
from tests.bench.test_result import TestEditedRuns

CHROMIUM = Path("/usr/bin/chromium")
EXTERNAL = re.compile(
    r"(?i)<(script|link|img|iframe|object|embed|base)\b|@import|url\((?!#)|\b(src|href|srcset)\s*=(?!\"#)"
)


def edited() -> dict[str, Any]:
    return TestEditedRuns().build()


def plain(**given: Any) -> dict[str, Any]:
    from lmcache_stream.bench.records import GENERATE, PhaseRecord
    from lmcache_stream.bench.result import build_result

    return build_result(about(options(**given), 40), finished(trace(40), PhaseRecord(GENERATE, "generate", 4.0)))


def interval(mean: float, n: int) -> dict[str, Any]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "n": n, "p": None, "sd": None}


def quality_file(folder: Path, **changes: Any) -> Path:
    """What `bench quality --json` writes, of two texts' measures and three tasks, one of which does not count."""
    variants: list[tuple[str, str, str | None, float]]
    variants = [("knorm/shared/0.5", "knorm", "shared", 0.5), ("knorm/shared/0.25", "knorm", "shared", 0.25)]
    variants += [("knorm/head/0.5", "knorm", "head", 0.5), ("keydiff/0.5", "keydiff", None, 0.5)]
    cells: list[dict[str, Any]] = []
    tasks: list[dict[str, Any]] = []
    for label, _, _, keep in variants:
        both = {"true": interval(0.1 / keep, 12), "greedy": interval(9.0, 12)}
        cell = {"variant": label, "group": "text", "kept": keep, "edit_s": 0.1, "score_s": 0.1, "accuracy": None}
        cells.append({**cell, "nll": both, "agreement": {"true": interval(0.9, 12), "greedy": interval(9.0, 12)}})
        for group, mean, n in (("find/after", 0.5, 10), ("find/window", 1.0, 30), ("none/after", 0.0, 10)):
            tasks.append({**cell, "group": group, "nll": {}, "agreement": {}, "accuracy": interval(mean, n)})
    content = {
        "schema": 1,
        "plan": {"continuations": ["true", "greedy"], "prompt_tokens": 704},
        "conditions": {"model": "SmolLM2"},
        "variants": [dict(zip(("label", "method", "scope", "keep"), one, strict=True)) for one in variants],
        "results": cells,
        "tasks": [{"group": g, "counts": g != "none/after"} for g in ("find/after", "find/window", "none/after")],
        "task_results": tasks,
        **changes,
    }
    path = folder / "quality.json"
    path.write_text(json.dumps(content))
    return path


class TestQuality:
    def test_lines_over_kept_ratios(self, tmp_path: Path) -> None:
        loss, same, right = read_quality(quality_file(tmp_path)).panels
        expected: Any = {
            "knorm": [(0.25, pytest.approx(0.4)), (0.5, pytest.approx(0.2))],
            "knorm by head": [(0.5, pytest.approx(0.2))],
            "keydiff": [(0.5, pytest.approx(0.2))],
        }
        assert loss.lines == expected
        assert "lower is better" in loss.unit
        assert same.lines["keydiff"] == [(0.5, 0.9)]
        # (0.5 * 10 + 1.0 * 30) / 40; the task that does not count is left out.
        assert right.lines["keydiff"][0] == pytest.approx((0.5, 0.875))

    def test_what_bench_quality_writes_is_read(self, tiny_model_path: Path, tmp_path: Path) -> None:
        quality.run(small(tiny_model_path, tmp_path, "--keep", "0.5", "--keep", "0.25", "--editor", "keydiff"))
        found = read_quality(tmp_path / "out.json")
        assert [len(points) for panel in found.panels for points in panel.lines.values()] == [2, 2]
        assert "10 texts" in found.about

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "cannot read --quality"),
            (b"{", "is not what bench quality --json writes"),
            (b'{"schema": 1}', "is not what bench quality --json writes"),
            (b"\xff\xfe", "is not what bench quality --json writes"),
        ],
    )
    def test_other_files_are_refused(self, content: bytes | None, said: str, tmp_path: Path) -> None:
        path = tmp_path / "quality.json"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UsageError, match=said):
            read_quality(path)

    def test_of_another_schema_or_of_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="has schema 2, and this version reads 1"):
            read_quality(quality_file(tmp_path, schema=2))
        with pytest.raises(UsageError, match="nothing to draw"):
            read_quality(quality_file(tmp_path, results=[], tasks=[]))


class Balanced(html.parser.HTMLParser):
    """Fails where a tag is not closed in its order."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


class TestPage:
    @pytest.mark.parametrize("result", [plain(), edited()], ids=["plain", "edited"])
    def test_is_whole_and_needs_nothing_from_elsewhere(self, result: dict[str, Any]) -> None:
        page = render_report([("x.json", result)])
        assert not EXTERNAL.search(page)
        assert "http" not in page
        assert "nan" not in page
        seen = parsed(page).seen
        assert seen.count("figure") >= 4
        assert seen.count("svg") > seen.count("figure")

    def test_has_a_chart_of_each_distribution(self) -> None:
        text = " ".join(parsed(render_report([("x.json", edited())])).text)
        for title in (
            *("Time to first token", "Time per output token", "Inter-token latency, by event"),
            *("Time of an edit", "Throughput over time", "Time to first token of the prefill"),
        ):
            assert title in text
        assert "knorm:keep=0.5" in text
        assert "baseline" in text

    def test_quality_stands_beside_where_it_was_measured(self, tmp_path: Path) -> None:
        page = render_report([("x.json", edited())], read_quality(quality_file(tmp_path)))
        seen = parsed(page)
        text = " ".join(seen.text)
        assert "Quality by kept ratio" in text
        assert "quality.json · SmolLM2 · 12 texts · 2 tasks that count" in text
        for name in ("knorm", "knorm by head", "keydiff"):
            assert name in text
        assert page.count("<figcaption>") == render_report([("x.json", edited())]).count("<figcaption>") + 3
        assert not EXTERNAL.search(page)
        assert "Quality by kept ratio" not in render_report([("x.json", edited())])

    def test_two_results_are_told_apart(self) -> None:
        page = render_report([("a.json", plain()), ("b.json", edited()), ("c.json", json.loads(RECORDED.read_text()))])
        text = parsed(page).text
        assert "A: generate" in text
        assert "B: knorm:keep=0.5" in text
        assert any("c.json" in part for part in text)

    def test_names_are_no_markup(self) -> None:
        result = plain()
        result["model_id"] = "<script>alert(1)</script>"
        result["lmcache_stream"]["run"] = "<b>"
        page = render_report([("<i>.json", result)])
        assert not {"script", "b", "i"} & set(parsed(page).seen)

    def test_of_an_empty_run(self) -> None:
        from lmcache_stream.bench.records import Ledger
        from lmcache_stream.bench.result import build_result

        page = render_report([("x.json", build_result(about(options(), 0), Ledger()))])
        assert "figure" not in parsed(page).seen

    def test_every_line_has_its_look_beside_its_name(self) -> None:
        page = render_report([("a.json", plain()), ("b.json", edited())])
        legend = page[page.index('<ul class="legend">') : page.index("</ul>")]
        names = ["A: generate", "B: knorm:keep=0.5", "B: baseline"]
        assert re.findall(r"</svg>([^<]+)</li>", legend) == names
        assert len(set(re.findall(r"<path d=.*?/>", legend, re.DOTALL))) >= 3

    def test_references_lead_to_one_place_in_the_page(self) -> None:
        page = render_report([("x.json", edited())])
        referred = set(re.findall(r"#([mp][0-9a-f]{10})", page))
        charts = page[page.index('<div class="charts">') :]
        assert referred
        assert referred <= set(re.findall(r' id="(\w+)"', page))
        assert len(re.findall(r' id="\w+"', charts)) == len(set(re.findall(r' id="(\w+)"', charts)))

    def test_without_matplotlib_it_says_how_to_get_charts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        page = parsed(render_report([("x.json", edited())]))
        assert "svg" not in page.seen
        assert "table" in page.seen
        assert "No charts: a plot needs matplotlib: pip install 'lmcache-stream[bench]'" in page.text

    @pytest.mark.skipif(not CHROMIUM.exists(), reason="needs /usr/bin/chromium")
    def test_a_browser_shows_it(self, tmp_path: Path) -> None:
        page = tmp_path / "report.html"
        page.write_text(render_report([("x.json", edited())], read_quality(quality_file(tmp_path))))
        command = [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        done = subprocess.run(
            [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout.count("<svg") == page.read_text().count("<svg")
        shot = tmp_path / "report.png"
        subprocess.run(
            [*command, f"--screenshot={shot}", "--window-size=1200,2600", page.as_uri()],
            capture_output=True,
            timeout=120,
            check=True,
        )
        assert shot.stat().st_size > 20_000
        shutil.rmtree(tmp_path / "profile", ignore_errors=True)


class TestChart:
    def test_is_wellformed_and_takes_the_colours_of_the_page(self) -> None:
        drawn = chart("a < b", lambda ax: ax.plot([1, 2], [3, 4], label="x & y"))
        root = ElementTree.fromstring(drawn.replace("xlink:", ""))
        assert root.findtext("title") == "a < b"
        assert "var(--ink)" in drawn
        assert INK not in drawn

    def test_is_the_same_each_time(self) -> None:
        one, other = (chart("t", lambda ax: ax.plot([1, 2], [3, 4], marker="o")) for _ in range(2))
        assert one == other

    def test_the_page_has_one_title_and_one_legend_for_all(self) -> None:
        drawn = chart("t", lambda ax: plot_latencies({"one": [0.1], "two": [0.2]}, title="a title", ax=ax))
        assert "milliseconds" in drawn
        assert not [word for word in ("a title", ">one<", ">two<") if word in drawn]

    def test_nothing_to_draw(self) -> None:
        assert chart("t", lambda ax: None) == ""


class TestTables:
    def shown(self, result: dict[str, Any]) -> str:
        out = io.StringIO()
        for table in tables(result):
            table.emit(out)
        return out.getvalue()

    def test_of_a_plain_run(self) -> None:
        result = plain(goodput={"ttft": 100.0}, metric_percentiles="50,99.9")
        shown = self.shown(result)
        assert "Serving benchmark: generate" in shown
        assert "Goodput" in shown
        assert f"{result['p99.9_ttft_ms']:.2f}" in shown
        assert "All runs" not in shown

    def test_of_edited_runs(self) -> None:
        shown = self.shown(edited())
        assert "Kept ratio" in shown
        assert "0.6667" in shown
        assert re.search(r"Over the baseline\s*│\s*1.3333", shown)
        assert re.search(r"with edit time\s*│\s*1.0000", shown)
