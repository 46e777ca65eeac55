"""Results to look at: tables for a terminal, and one HTML page that needs nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lmcache_stream.bench.quality_lines import Panel, Quality
from lmcache_stream.bench.result_file import Distribution, EditsWhileDecodingResult, RunResult, StreamResult
from lmcache_stream.bench.svg import chart, line_sample
from lmcache_stream.errors import UsageError
from lmcache_stream.metrics import Metrics, Section
from lmcache_stream.metrics.statistics import rate
from lmcache_stream.plots import plot_latencies, plot_throughput
from lmcache_stream.plots.look import plain_axes, require_matplotlib, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["METRIC_NAMES", "render_report", "tables"]

METRIC_NAMES: Final = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency, by event",
    "itl_spread": "Inter-token latency, by token",
    "e2el": "End-to-end latency",
    "client_queue_time": "Client queue time",
    "e2el_including_client_queue": "End-to-end latency with client queue",
}

Chart: TypeAlias = "tuple[str, Callable[[Axes], object]]"
"""A title, and what draws it."""

STYLE: Final = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #656d76; --rule: #d0d7de; --back: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --rule: #3d444d; --back: #0d1117; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
  max-width: 1360px; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { color: var(--soft); margin: .25rem 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { font-family: inherit; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: .75rem 0; padding: 0; list-style: none; }
.legend svg { width: 3.6em; vertical-align: middle; margin-right: .4em; }
"""


def tables(result: Mapping[str, Any], width: int = 80) -> list[Metrics]:
    """The tables of a result: the measured run in the terms of `vllm bench serve`, then all runs side by side."""
    ours = StreamResult.model_validate(result["lmcache_stream"])
    table = Metrics(f"Serving benchmark: {ours.run}", width=width)
    requests = table.add_section("requests", "Requests")
    requests.add("completed", "Successful", result["completed"])
    requests.add("failed", "Failed", result["failed"])
    if ours.unfinished:
        requests.add("unfinished", "Not done", ours.unfinished)
    requests.add("duration", "Duration (s)", result["duration"])
    requests.add("total_input_tokens", "Input tokens", result["total_input_tokens"])
    requests.add("total_output_tokens", "Generated tokens", result["total_output_tokens"])
    throughput = table.add_section("throughput", "Throughput")
    throughput.add("request_throughput", "Requests (req/s)", result["request_throughput"])
    if result["request_goodput"] is not None:
        throughput.add("request_goodput", "Goodput (req/s)", result["request_goodput"])
    throughput.add("output_throughput", "Generated tokens (tok/s)", result["output_throughput"])
    throughput.add("max_output_tokens_per_s", "Peak of generated tokens (tok/s)", result["max_output_tokens_per_s"])
    throughput.add("total_token_throughput", "All tokens (tok/s)", result["total_token_throughput"])
    for metric, title in METRIC_NAMES.items():
        keys = [key for key in result if key.endswith(f"_{metric}_ms") and key.split("_", 1)[1] == f"{metric}_ms"]
        if keys:
            _add(table.add_section(metric, f"{title} (ms)"), {key.split("_", 1)[0]: result[key] for key in keys})
    if ours.modify is not None:
        _add_edit(table.add_section("edit", "Edit"), ours)
    if (edits := ours.edits_while_decoding) is not None:
        _add_edits_while_decoding(table.add_section("while_decoding", f"Edits every {edits.every:,} tokens"), edits)
    if not ours.other_runs:
        return [table]
    return [table, _comparison([ours, *ours.other_runs], width)]


def _add(section: Section, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        section.add(name, name.capitalize(), float(value))


def _add_edit(section: Section, run: RunResult) -> None:
    modify = run.modify
    assert modify is not None
    section.add("completed", "Edits", modify.completed)
    section.add("failed", "Failed", modify.failed)
    section.add("kept_ratio", "Kept ratio", run.kept_ratio)
    section.add("bytes_moved", "Bytes moved", run.bytes_moved)
    section.add("edit_time", "Time of all edits (s)", run.edit_time)
    section.add("edit_ms", "Time of an edit, mean (ms)", modify.edit_ms.mean if modify.edit_ms else None)
    section.add("edit_taken_ratio", "Edited tokens taken from the cache", run.edit_taken_ratio)
    section.add("with_edit_time", "Generated tokens with edit time (tok/s)", run.with_edit_time.output_tokens)


def _add_edits_while_decoding(section: Section, edits: EditsWhileDecodingResult) -> None:
    section.add("completed", "Edits", edits.completed)
    section.add("tokens_before", "Tokens before, mean", rate(edits.tokens_before, edits.completed))
    section.add("tokens_after", "Tokens after, mean", rate(edits.tokens_after, edits.completed))
    section.add("edit_ms", "Time of an edit, mean (ms)", edits.edit_ms.mean if edits.edit_ms else None)
    section.add("share", "Share of the requests' time", edits.share)


def _comparison(runs: Sequence[RunResult], width: int) -> Metrics:
    table = Metrics("All runs", width=width)
    for run in runs:
        section = table.add_section(run.run, run.run)
        section.add("output_tput", "Generated tokens (tok/s)", run.without_edit_time.output_tokens)
        if run.modify is not None:
            section.add("output_tput_with_edit", "  with edit time", run.with_edit_time.output_tokens)
        if run.gain_without_edit_time is not None:
            section.add("gain", "Over the baseline", run.gain_without_edit_time)
            section.add("gain_with_edit", "  with edit time", run.gain_with_edit_time)
        section.add("completed", "Successful", run.last.completed)
        section.add("ttft_ms", "TTFT, mean (ms)", run.last.ttft_ms.mean if run.last.ttft_ms else None)
        section.add("tpot_ms", "TPOT, mean (ms)", run.last.tpot_ms.mean if run.last.tpot_ms else None)
        section.add("kept_ratio", "Kept ratio", run.kept_ratio)
    return table


def render_report(results: Sequence[tuple[str, Mapping[str, Any]]], quality: Quality | None = None) -> str:
    """One HTML page over one or more results: a table, and charts of all their runs.

    Args:
        results: Name and content of each; those of `vllm bench serve` itself are named, and have no charts.
        quality: What editors keep of the model's answers, where that was measured.

    Returns:
        The page; it refers to nothing outside itself.
    """
    runs: list[tuple[str, RunResult]] = []
    letters = list(ascii_uppercase) if len(results) > 1 else [""]
    for letter, (_, result) in zip(letters, results, strict=False):
        if ours := result.get("lmcache_stream"):
            parsed = StreamResult.model_validate(ours)
            prefix = f"{letter}: " if letter else ""
            runs += [(prefix + run.run, run) for run in (parsed, *parsed.other_runs)]
    title = "Benchmark: " + ", ".join(dict.fromkeys(str(result.get("model_id", name)) for name, result in results))
    body = [f"<h1>{html.escape(title)}</h1>"]
    body += [_facts(letter, name, result) for letter, (name, result) in zip(letters, results, strict=False)]
    body.append(_run_table(runs) if runs else "")
    body += _drawn(runs, quality)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(filter(None, body))
        + "\n</body></html>\n"
    )


def _facts(letter: str, name: str, result: Mapping[str, Any]) -> str:
    facts = [
        f"{letter}: {name}" if letter else name,
        str(result.get("date", "")),
        f"{result['completed']} successful, {result.get('failed', 0)} failed",
        f"request rate {result.get('request_rate')}",
        f"max concurrency {result.get('max_concurrency') or 'none'}",
    ]
    if (result.get("lmcache_stream") or {}).get("interrupted"):
        facts.append("interrupted before its end")
    return f"<p>{html.escape(' · '.join(filter(None, facts)))}</p>"


def _run_table(runs: Sequence[tuple[str, RunResult]]) -> str:
    columns: list[tuple[str, Callable[[RunResult], str]]] = [
        ("Successful", lambda run: f"{run.last.completed:,}"),
        ("Failed", lambda run: f"{run.last.failed:,}"),
        ("Output tok/s", lambda run: f"{run.without_edit_time.output_tokens:,.1f}"),
        ("with edit time, tok/s", lambda run: f"{run.with_edit_time.output_tokens:,.1f}"),
        ("× baseline", lambda run: _shown(run.gain_without_edit_time, ".2f")),
        ("with edit time, ×", lambda run: _shown(run.gain_with_edit_time, ".2f")),
        ("TTFT mean, ms", lambda run: _shown(run.last.ttft_ms and run.last.ttft_ms.mean, ",.1f")),
        ("TPOT mean, ms", lambda run: _shown(run.last.tpot_ms and run.last.tpot_ms.mean, ",.2f")),
        ("ITL p99, ms", lambda run: _shown(run.last.itl_ms and run.last.itl_ms.p99, ",.2f")),
        ("Kept", lambda run: _shown(run.kept_ratio, ".1%")),
        ("Edit mean, ms", lambda run: _shown(run.modify and run.modify.edit_ms and run.modify.edit_ms.mean, ",.1f")),
        ("Edits while decoding", lambda run: _shown((later := run.edits_while_decoding) and later.completed, ",")),
        ("Edit taken", lambda run: _shown(run.edit_taken_ratio, ".1%")),
    ]
    head = "".join(f"<th>{html.escape(title)}</th>" for title, _ in columns)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{cell(run)}</td>' for _, cell in columns)}</tr>"
        for name, run in runs
    )
    return f'<h2>Runs</h2><div class="scroll"><table><tr><th>Run</th>{head}</tr>{rows}</table></div>'


def _shown(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


def _drawn(runs: Sequence[tuple[str, RunResult]], quality: Quality | None) -> Iterator[str]:
    try:
        require_matplotlib()
    except UsageError as error:
        yield f"<p>No charts: {html.escape(str(error))}</p>"
        return
    if runs:
        yield "<h2>Latencies and throughput</h2>"
        yield _legend([name for name, _ in runs])
        yield from _figures(_charts(runs))
    if quality is not None:
        lines = list(dict.fromkeys(name for panel in quality.panels for name in panel.lines))
        yield f"<h2>Quality by kept ratio</h2><p>{html.escape(quality.about)}</p>"
        yield _legend(lines)
        yield from _figures(_quality_charts(quality, lines))


def _legend(names: Sequence[str]) -> str:
    items = "".join(f"<li>{line_sample(number)}{html.escape(name)}</li>" for number, name in enumerate(names))
    return f'<ul class="legend">{items}</ul>'


def _figures(charts: Iterator[Chart]) -> Iterator[str]:
    yield '<div class="charts">'
    for title, draw in charts:
        if drawn := chart(title, draw):
            yield f"<figure><figcaption>{html.escape(title)}</figcaption>{drawn}</figure>"
    yield "</div>"


def _charts(runs: Sequence[tuple[str, RunResult]]) -> Iterator[Chart]:
    spreads: list[tuple[str, Callable[[RunResult], Distribution | None]]] = [
        (METRIC_NAMES["ttft"], lambda run: run.last.ttft_ms),
        (METRIC_NAMES["tpot"], lambda run: run.last.tpot_ms),
        (METRIC_NAMES["itl"], lambda run: run.last.itl_ms),
        (METRIC_NAMES["itl_spread"], lambda run: run.last.itl_spread_ms),
        ("Time of an edit", lambda run: run.modify.edit_ms if run.modify else None),
        ("Time of an edit while decoding", lambda run: later.edit_ms if (later := run.edits_while_decoding) else None),
    ]
    for title, of in spreads:
        yield title, _latencies({name: of(run) for name, run in runs})
    prefills = {name: prefill.ttft_ms for name, run in runs[:1] if (prefill := run.phases.get("prefill"))}
    yield "Time to first token of the prefill", _latencies(prefills)
    throughput = {name: run.last.throughput for name, run in runs}
    yield "Throughput over time", lambda ax: plot_throughput(throughput, ax=ax)


def _latencies(spreads: Mapping[str, Distribution | None]) -> Callable[[Axes], object]:
    runs = {name: [q / 1000 for q in spread.quantiles] if spread else [] for name, spread in spreads.items()}
    return lambda ax: plot_latencies(runs, ax=ax)


def _quality_charts(quality: Quality, lines: Sequence[str]) -> Iterator[Chart]:
    for panel in quality.panels:
        yield panel.title, partial(_draw_quality, panel, lines)


def _draw_quality(panel: Panel, lines: Sequence[str], ax: Axes) -> None:
    for index, name in enumerate(lines):
        if points := panel.lines.get(name):
            ax.plot(*zip(*points, strict=True), label=name, **style(index))
    plain_axes(ax, "kept ratio", panel.unit)
