"""Where a command's words go, and its JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console

__all__ = ["JsonOutput", "add_json_file", "add_json_flag", "open_console"]

STANDARD_OUTPUT: Final = "-"


class JsonOutput:
    """One JSON object: in a file, or alone on standard output.

    Args:
        target: The file's path; "-" for the standard output of this moment.
    """

    def __init__(self, target: str) -> None:
        self.path: Path | None = None if target == STANDARD_OUTPUT else Path(target)
        self._stdout = sys.stdout

    def check(self) -> None:
        """Look before the work whether the file can be written.

        Raises:
            UsageError: Its folder is not there, or it is a folder itself.
        """
        if self.path is not None and (self.path.is_dir() or not self.path.absolute().parent.is_dir()):
            raise UsageError(f"cannot write {self.path}: --json takes a file in a folder that exists")

    def write(self, document: Mapping[str, Any]) -> None:
        """Write the object.

        Raises:
            OSError: The file cannot be written.
        """
        self.write_text(json.dumps(document, indent=2, ensure_ascii=self.path is None) + "\n")

    def write_text(self, text: str) -> None:
        """Write the object as text that is JSON already.

        Raises:
            OSError: The file cannot be written.
        """
        if self.path is not None:
            self.path.write_text(text, encoding="utf-8")
        else:
            self._stdout.write(text)
            self._stdout.flush()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Send everything else to standard error, if the object goes to standard output."""
        if self.path is not None:
            yield
        else:
            with contextlib.redirect_stdout(sys.stderr):
                yield


class _Json(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, JsonOutput(values or STANDARD_OUTPUT))


def add_json_flag(parser: argparse._ActionsContainer) -> None:
    """Declare `--json`: one JSON object on standard output."""
    parser.add_argument(
        "--json", action=_Json, nargs=0, help="print one JSON object; tables and messages go to standard error"
    )


def add_json_file(parser: argparse._ActionsContainer) -> None:
    """Declare `--json [FILE]`: the same, or into a file beside the tables."""
    parser.add_argument(
        "--json",
        action=_Json,
        nargs="?",
        metavar="FILE",
        help="write one JSON object to this file, too; without a file, print it, and the tables to standard error",
    )


def open_console(file: IO[str] | None = None, *, width: int | None = None) -> Console:
    """What prints tables and styled words.

    There is no escape sequence in them but on a terminal that is not dumb, where `NO_COLOR` is not set.

    Args:
        file: Where they go; None for the standard output of this moment.
        width: Columns; None for those of the terminal.
    """
    from rich.console import Console

    out = sys.stdout if file is None else file
    # Decided here, not by FORCE_COLOR: Jupyter sets that for output that no terminal shows.
    styled = out.isatty() and not os.environ.get("NO_COLOR")
    console = Console(
        file=out, width=width, force_jupyter=False, highlight=False, color_system="auto" if styled else None
    )
    if console.is_dumb_terminal:  # which rich takes for 80 columns wide, unless it is told both
        size = shutil.get_terminal_size()
        console.width, console.height = width or size.columns, size.lines
    return console
