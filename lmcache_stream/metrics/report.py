"""A report: titled sections of values, as a table, as JSON, as HTML."""

from __future__ import annotations

import html
import json
import math
import sys
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from lmcache_stream.console import open_console
from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import IO, Self, TypeAlias

    Value: TypeAlias = int | float | str | None

__all__ = ["FORMATS", "MIN_WIDTH", "Metrics", "Section", "check_format"]

FORMATS = ("terminal", "json")
MIN_WIDTH = 40


def check_format(fmt: str, width: int = 80) -> None:
    """Refuse a report format or a width that `Metrics` cannot show, with a `UsageError`."""
    if fmt not in FORMATS:
        raise UsageError(f"fmt must be one of {', '.join(map(repr, FORMATS))}, not {fmt!r}")
    if type(width) is not int or width < MIN_WIDTH:
        raise UsageError(f"width must be a whole number of at least {MIN_WIDTH} columns, not {width!r}")


class Section:
    """One titled group of values in a report, in the order in which they were added."""

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.title = title
        self.rows: list[tuple[str, dict[str, Value]]] = []

    def add(self, key: str, label: str, value: Value) -> Self:
        """Add a value: `key` names it in `Metrics.to_dict`, `label` in the table."""
        return self.add_row(label, {key: value})

    def add_row(self, label: str, values: Mapping[str, Value]) -> Self:
        """Add several values by key that the table shows in one row."""
        if twice := self.to_dict().keys() & values.keys():
            raise UsageError(f"section {self.name!r} has {sorted(twice)} already; give each value a key of its own")
        self.rows.append((label, dict(values)))
        return self

    def to_dict(self) -> dict[str, Value]:
        """Value by key."""
        return {key: value for _, values in self.rows for key, value in values.items()}


class Metrics:
    """A report: a title and sections of values.

    Args:
        title: The report's title.
        fmt: What `emit` writes: "terminal" for a table, "json" for one JSON document.
        width: Columns of the table.
    """

    def __init__(self, title: str, fmt: str = "terminal", width: int = 80) -> None:
        check_format(fmt, width)
        self.title = title
        self.fmt = fmt
        self.width = width
        self._sections: dict[str, Section] = {}

    def add_section(self, name: str, title: str) -> Section:
        """Open a section: `name` names it in `to_dict`, `title` in the table."""
        if name in self._sections:
            raise UsageError(f"the report has a section {name!r} already; add to that one")
        section = self._sections[name] = Section(name, title)
        return section

    def to_dict(self) -> dict[str, object]:
        """`{"title": title, "metrics": {section: {key: value}}}`, a new dictionary each time."""
        return {
            "title": self.title,
            "metrics": {section.name: section.to_dict() for section in self._sections.values()},
        }

    def emit(self, file: IO[str] | None = None) -> None:
        """Write the report to `file` (default: standard output) in its format.

        A table has colours and bold type only where `file` is a terminal and `NO_COLOR` is not set.
        """
        out = sys.stdout if file is None else file
        if self.fmt == "json":
            out.write(json.dumps(_finite(self.to_dict()), indent=2, allow_nan=False) + "\n")
        else:
            open_console(out, width=self.width).print(self._table())

    def _table(self) -> Table:
        table = Table(
            title=Text(self.title, style="bold"), title_justify="left", box=box.ROUNDED, show_header=False, expand=True
        )
        table.add_column(ratio=1, overflow="fold")
        table.add_column(ratio=1, overflow="fold", justify="right")
        for section in self._sections.values():
            table.add_row(Text(_printable(section.title), style="bold cyan"), "")
            for label, values in section.rows:
                cells = "".join(f"{_show(value):>9}" for value in values.values())
                table.add_row(Text("  " + _printable(label)), Text(cells.strip()))
            table.add_section()
        return table

    def _repr_html_(self) -> str:
        columns = max((len(values) for section in self._sections.values() for _, values in section.rows), default=1)
        lines = ["<table>", f"<caption>{html.escape(self.title)}</caption>"]
        for section in self._sections.values():
            title = html.escape(section.title)
            lines.append(f'<tr><th colspan="{columns + 1}" style="text-align: left">{title}</th></tr>')
            for label, values in section.rows:
                span = columns - len(values) + 1
                cells = [f'<td style="text-align: left">{html.escape(label)}</td>']
                for value in values.values():
                    cells.append(f'<td colspan="{span}" style="text-align: right">{html.escape(_show(value))}</td>')
                    span = 1
                lines.append(f"<tr>{''.join(cells)}</tr>")
        lines.append("</table>")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Metrics({self.title!r}, {self.to_dict()['metrics']!r})"


def _show(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 100 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else _printable(value)


def _finite(value: object) -> object:
    """`value` with null for what JSON cannot say: infinity and not-a-number."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _printable(text: str) -> str:
    # A server's error text ends up here: it must not steer the terminal.
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
