"""The command: its options, and what it prints."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.table import Table
from rich.text import Text

from lmcache_stream.console import add_json_flag, open_console
from lmcache_stream.serving.doctor.diagnosis import diagnose
from lmcache_stream.serving.doctor.findings import Finding, Status, has_failed
from lmcache_stream.serving.doctor.options import DoctorOptions

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["add_arguments", "run"]

COLOURS: Final[Mapping[Status, str]] = {"pass": "green", "fail": "bold red", "warn": "yellow", "skip": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `lmcache-stream doctor`."""
    parser.description = (
        "Send real requests to a vLLM and its LMCache server, and say for everything that has to fit whether it does "
        "and what to change. The addresses may stand in LMCACHE_STREAM_BASE_URL, LMCACHE_STREAM_KV_URL and "
        "LMCACHE_STREAM_KV_HTTP_URL."
    )

    def add(flag: str, *variables: str, required: bool = False, **given: Any) -> None:
        default = next((os.environ[name] for name in variables if os.environ.get(name)), None)
        parser.add_argument(flag, default=default, required=required and default is None, **given)

    add(
        "--base-url",
        *("LMCACHE_STREAM_BASE_URL", "OPENAI_BASE_URL"),
        required=True,
        metavar="URL",
        help="of the engine, such as http://localhost:8000",
    )
    add(
        "--kv-url",
        "LMCACHE_STREAM_KV_URL",
        required=True,
        metavar="URL",
        help="where the cache server takes requests, such as tcp://localhost:5555",
    )
    add(
        "--kv-http-url",
        "LMCACHE_STREAM_KV_HTTP_URL",
        required=True,
        metavar="URL",
        help="the same server's HTTP address, such as http://localhost:8080",
    )
    add(
        "--model",
        "LMCACHE_STREAM_SERVED_MODEL",
        metavar="NAME",
        help="in requests to the engine (default: the one that it serves)",
    )
    add(
        "--kv-model",
        "LMCACHE_STREAM_KV_MODEL",
        metavar="NAME",
        help="in the cache (default: what the engine says that it loaded, vLLM's --model)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="of the engine (default: $OPENAI_API_KEY)")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="that one check takes at most (%(default)g)"
    )
    add_json_flag(parser)
    parser.add_argument(
        "--no-probe",
        dest="probe",
        action="store_false",
        help="do not prove how the KV is to be read, which takes a prompt of some 2,000 tokens",
    )


def run(args: argparse.Namespace) -> int:
    """Examine, and print what was found.

    Returns:
        0 when nothing failed, else 1.

    Raises:
        UsageError: The options cannot be right.
    """
    options = DoctorOptions(
        base_url=args.base_url,
        kv_url=args.kv_url,
        kv_http_url=args.kv_http_url,
        model=args.model,
        kv_model=args.kv_model,
        api_key=args.api_key,
        timeout=args.timeout,
        probe=args.probe,
    )
    with progress() as on_check:
        findings = asyncio.run(diagnose(options, on_check=on_check))
    if args.json is not None:
        args.json.write(document(options, findings))
    else:
        show(findings, open_console())
    return int(has_failed(findings))


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None] | None]:
    """Tells a terminal on standard error which check is under way."""
    console = open_console(sys.stderr)
    if not console.is_terminal:
        yield None
        return
    with console.status("") as status:
        yield lambda name: status.update(f"checking: {name}")


def document(options: DoctorOptions, findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as one JSON object."""
    return {
        "ok": not has_failed(findings),
        "base_url": options.base_url,
        "kv_url": options.kv_url,
        "kv_http_url": options.kv_http_url,
        "findings": [asdict(finding) for finding in findings],
    }


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print a table of the findings, with the remedies in it, and how many there are of each kind."""
    table = Table(box=box.ROUNDED)
    table.add_column("Check", no_wrap=True)
    table.add_column("Result", no_wrap=True)
    table.add_column("What was seen, and what to change", overflow="fold")
    for finding in findings:
        words = Text(finding.detail)
        if finding.remedy:
            words.append("\nTo change: ", style="bold").append(finding.remedy)
        table.add_row(Text(finding.name), Text(finding.status, style=COLOURS[finding.status]), words)
    console.print(table)
    counts = ((status, sum(finding.status == status for finding in findings)) for status in COLOURS)
    console.print(Text(", ".join(f"{count} {status}" for status, count in counts if count)))
