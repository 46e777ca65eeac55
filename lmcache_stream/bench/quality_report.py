"""What `lmcache-stream bench quality` hands out: a JSON file, a plot, tables."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from lmcache_stream.bench import plots
from lmcache_stream.bench.quality_lines import SCHEMA, line_name
from lmcache_stream.bench.statistics import Interval, wilson
from lmcache_stream.bench.summary import QUALIFIES
from lmcache_stream.bench.tasks import FORMS
from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from lmcache_stream.bench.experiment import Report, TaskReport
    from lmcache_stream.bench.variants import Variant

__all__ = ["show", "to_json", "write_plot"]

WIDEST: Final = 110
STATISTICS: Final = (
    "Intervals are of 95 %. Differences are paired by sample; their intervals and p-values are Student's with the"
    " variance of sums by document (of single samples where each is a document of its own). Accuracies have Wilson's"
    " interval and are compared by McNemar's exact test. Holm's method holds the family-wise error at 0.05 in each of"
    " two families: scopes against shared, and editors against the baseline. The pilot's texts are not measured again."
)


def to_json(report: Report) -> str:
    """A report with every per-sample number as one JSON object, one entry of a list a line."""
    plan = {name: value for name, value in vars(report.plan).items() if name != "variants"}
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "conditions": report.conditions,
        "plan": plan,
        "corpus": {"name": report.corpus.name, "about": report.corpus.about, "sha256": report.corpus.sha256},
        "statistics": STATISTICS,
        "variants": [
            {"label": v.label, "method": v.method, "scope": v.scope, "keep": v.keep, "definition": v.definition}
            for v in report.plan.variants
        ],
        "left_out": report.left_out,
        "needed": report.needed,
        "results": report.cells,
        "tasks": [{"group": t.group, "accuracy": t.accuracy, "counts": t.counts} for t in report.tasks],
        "task_results": [cell for task in report.tasks for cell in task.cells],
        "comparisons": report.comparisons,
        "samples": [*report.texts, *(record for task in report.tasks for record in task.records)],
    }
    lines = [f"{msgspec.json.encode(key).decode()}: {_listed(value)}" for key, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_plot(report: Report, path: Path) -> None:
    """Draw the difference on texts, and the accuracy over all tasks that count, over the share of tokens kept."""
    probe = report.plan.main
    by_label = {variant.label: variant for variant in report.plan.variants}
    panels = []
    if report.cells:
        points = [(by_label[c.variant], c.kept, c.nll[probe]) for c in report.cells]
        followed = "the text's own" if probe == "true" else "its greedy"
        panels.append(
            plots.Panel(
                title=f"{report.plan.new_tokens} tokens of {followed} continuation, {len(report.texts)} texts",
                ylabel="NLL against all KV (nats a token; lower is better)",
                lines=_lines(points),
                reference=0.0,
                logarithmic=True,
            )
        )
    counted = [task for task in report.tasks if task.counts]
    for form in FORMS:
        tasks = [task for task in counted if task.group.endswith(f"/{form}")]
        if tasks:
            panels.append(_task_panel(tasks, form, by_label))
    if not panels:
        raise UsageError("there is nothing to draw: no texts, and no task that counts")
    plots.plot_quality(panels, path, f"{report.conditions['model']}, bars: 95 % intervals")


def show(report: Report) -> None:
    """Print tables of what was found, and what was left out."""
    from rich.text import Text

    from lmcache_stream.console import open_console

    width = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
    console = open_console(width=width)
    tables = []
    if report.cells:
        tables.append(_texts_table(report))
    if any(task.counts for task in report.tasks):
        tables.append(_tasks_table(report))
    if report.comparisons:
        tables.append(_comparisons_table(report))
    for table in tables:
        for column in table.columns:
            column.no_wrap, column.overflow = width == WIDEST, "fold"  # in less, numbers are rather folded than cut
        console.print(table)
    for line in _notes(report):
        console.print(Text(line))


def _task_panel(tasks: Sequence[TaskReport], form: str, by_label: dict[str, Variant]) -> plots.Panel:
    cells = {label: [cell for task in tasks for cell in task.cells if cell.variant == label] for label in by_label}
    points = []
    for label, mine in cells.items():
        right = sum(round(cell.accuracy.mean * cell.accuracy.n) for cell in mine if cell.accuracy is not None)
        total = sum(cell.accuracy.n for cell in mine if cell.accuracy is not None)
        points.append((by_label[label], mine[0].kept, wilson(right, total)))
    full = sum(task.accuracy.mean for task in tasks) / len(tasks)
    where = "after the drop" if form == "after" else "inside the window"
    names = ", ".join(task.group.partition("/")[0] for task in tasks)
    return plots.Panel(
        title=f"question {where} ({names})", ylabel="answers right (line: all KV)", lines=_lines(points), reference=full
    )


def _lines(points: Iterable[tuple[Variant, float, Interval]]) -> list[plots.Line]:
    lines: dict[str, list[plots.Point]] = {}
    for variant, kept, value in points:
        name = line_name(variant.method, variant.scope)
        lines.setdefault(name, []).append(plots.Point(kept, value.mean, value.low, value.high))
    return [plots.Line(name, at) for name, at in lines.items()]


def _texts_table(report: Report) -> Table:
    probes = report.plan.continuations
    headings = [heading for probe in probes for heading in (f"NLL, {probe}", "Same top")]
    table = _table(f"Texts continued by {report.conditions['model']}", "Kept", *headings, "Edit ms")
    full = [math.fsum(record.full[probe].nll for record in report.texts) / len(report.texts) for probe in probes]
    cells = [cell for nll in full for cell in (f"{nll:.3f}", "100%")]
    table.add_row("all KV", "100%", *cells, "", style="bold", end_section=True)
    for cell in report.cells:
        row = []
        for probe in probes:
            nll = cell.nll[probe]
            row += [f"{nll.mean:+.3f} ± {nll.half_width:.3f}", f"{cell.agreement[probe].mean:.0%}"]
        table.add_row(cell.variant, f"{cell.kept:.0%}", *row, f"{1000 * cell.edit_s:.0f}")
    return table


def _tasks_table(report: Report) -> Table:
    tasks = [task for task in report.tasks if task.counts]
    table = _table("Answers that are right", "Kept", *(task.group.replace("/", "\n") for task in tasks))
    table.add_row("all KV", "100%", *(f"{task.accuracy.mean:.2f}" for task in tasks), style="bold", end_section=True)
    for cells in zip(*(task.cells for task in tasks), strict=True):
        right = [f"{cell.accuracy.mean:.2f}" for cell in cells if cell.accuracy is not None]
        table.add_row(cells[0].variant, f"{cells[0].kept:.0%}", *right)
    return table


def _table(title: str, *numbers: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.ROUNDED)
    table.add_column("Editor", overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _comparisons_table(report: Report) -> Table:
    table = _table("Compared in pairs, p after Holm")
    for heading in ("Against", "On"):
        table.add_column(heading, overflow="fold")
    for heading in ("Difference", "p"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("It is", no_wrap=True)
    for one in report.comparisons:
        difference = f"{one.difference.mean:+.3f} ± {one.difference.half_width:.3f}"
        table.add_row(one.variant, one.against, one.group, difference, f"{one.p_holm:.3f}", one.verdict)
    return table


def _notes(report: Report) -> Iterator[str]:
    plan = report.plan
    if report.texts:
        documents = len({record.id.rpartition("@")[0] for record in report.texts})
        yield (
            f"{len(report.texts)} texts from {documents} documents of {report.corpus.about};"
            f" {plan.prompt_tokens} tokens are edited, {plan.new_tokens} scored."
            " Differences are nats a token against all KV, paired, ± 95 %."
        )
    if report.needed:
        short = sum(need.texts > len(report.texts) for need in report.needed)
        yield (
            f"The pilot of {plan.pilot} asked for {max(need.texts for need in report.needed)} texts"
            f" (± {plan.half_width} nats); {short} of {len(report.needed)} comparisons got fewer than they need."
        )
    for task in report.tasks:
        if not task.counts:
            yield f"Does not count: {task.group}, {task.accuracy.mean:.2f} right with all KV, under {QUALIFIES}."
    for out in report.left_out:
        yield f"Left out: {out.what}: {out.why}."


def _listed(value: Any) -> str:
    if not isinstance(value, list):
        return msgspec.json.encode(value).decode()
    return "[\n  " + ",\n  ".join(msgspec.json.encode(item).decode() for item in value) + "\n]" if value else "[]"
