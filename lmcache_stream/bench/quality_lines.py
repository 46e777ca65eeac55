"""Reads what `lmcache-stream bench quality --json` wrote, as lines of quality over the share of tokens kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from lmcache_stream.errors import UsageError

__all__ = ["SCHEMA", "Panel", "Quality", "line_name", "read_quality"]

SCHEMA: Final = 1
"""Version of the JSON file's form."""

Points = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Panel:
    """One measure of quality.

    Args:
        title: What it is.
        unit: What its values are, and which are better.
        lines: Name of an editor and its scope -> `(kept ratio, value)` pairs, by kept ratio.
    """

    title: str
    unit: str
    lines: Points


@dataclass(frozen=True)
class Quality:
    """What was measured of a model.

    Args:
        about: The file, the model, and how much was measured.
        panels: One a measure; none is empty.
    """

    about: str
    panels: tuple[Panel, ...]


class _Interval(msgspec.Struct):
    mean: float
    n: int = 0


class _Variant(msgspec.Struct):
    label: str
    method: str
    scope: str | None = None


class _Cell(msgspec.Struct):
    variant: str
    kept: float
    group: str = "text"
    nll: dict[str, _Interval] = {}
    agreement: dict[str, _Interval] = {}
    accuracy: _Interval | None = None


class _Task(msgspec.Struct):
    group: str
    counts: bool


class _Plan(msgspec.Struct):
    continuations: list[str]


class _Content(msgspec.Struct):
    schema: int
    plan: _Plan
    conditions: dict[str, str]
    variants: list[_Variant]
    results: list[_Cell]
    tasks: list[_Task]
    task_results: list[_Cell]


def line_name(method: str, scope: str | None) -> str:
    """What a line of a method's values is called, in one scope."""
    return method if scope in (None, "shared") else f"{method} by {scope}"


def read_quality(path: Path) -> Quality:
    """Read the JSON file of a measurement of quality. It blocks.

    Raises:
        UsageError: It cannot be read, is no such file, or nothing was measured.
    """
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_Content)
    except OSError as error:
        raise UsageError(f"cannot read --quality {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"--quality {path} is not what bench quality --json writes: {error}") from error
    if content.schema != SCHEMA:
        raise UsageError(f"--quality {path} has schema {content.schema}, and this version reads {SCHEMA}")
    counted = [task.group for task in content.tasks if task.counts]
    panels = tuple(panel for panel in _panels(content, counted) if panel.lines)
    if not panels:
        raise UsageError(f"--quality {path} has nothing to draw: no texts, and no task that counts")
    texts = max((interval.n for cell in content.results for interval in cell.nll.values()), default=0)
    about = [path.name, content.conditions.get("model", ""), f"{texts:,} texts", f"{len(counted)} tasks that count"]
    return Quality(" · ".join(filter(None, about)), panels)


def _panels(content: _Content, counted: list[str]) -> Iterator[Panel]:
    lines = {variant.label: line_name(variant.method, variant.scope) for variant in content.variants}
    if content.results and content.plan.continuations:
        main = content.plan.continuations[0]
        followed = "the text's own words" if main == "true" else "the model's own"
        nll = ((cell.variant, cell.kept, cell.nll[main].mean) for cell in content.results if main in cell.nll)
        yield Panel(f"Loss on {followed}, over all KV's", "nats a token (lower is better)", _by_line(lines, nll))
        same = (
            (cell.variant, cell.kept, cell.agreement[main].mean) for cell in content.results if main in cell.agreement
        )
        yield Panel("Likeliest next token is that with all KV", "share (higher is better)", _by_line(lines, same))
    right = (
        (label, cells[0].kept, sum(interval.mean * interval.n for interval in found) / count)
        for label, cells in _by_variant(content.task_results, counted).items()
        if (found := [cell.accuracy for cell in cells if cell.accuracy]) and (count := sum(one.n for one in found))
    )
    yield Panel("Answers that are right, over all tasks that count", "share (higher is better)", _by_line(lines, right))


def _by_variant(cells: Iterable[_Cell], groups: list[str]) -> dict[str, list[_Cell]]:
    found: dict[str, list[_Cell]] = {}
    for cell in cells:
        if cell.group in groups:
            found.setdefault(cell.variant, []).append(cell)
    return found


def _by_line(lines: dict[str, str], points: Iterable[tuple[str, float, float]]) -> Points:
    found: Points = {}
    for label, kept, value in points:
        found.setdefault(lines.get(label, label), []).append((kept, value))
    return {name: sorted(at) for name, at in found.items()}
