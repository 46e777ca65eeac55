"""The command line: `lmcache-stream COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

# A command is a module with `add_arguments(parser)` and `run(options)`; it is imported when it is named.
COMMANDS = {
    "demo": ("lmcache_stream.bench.demo", "answer questions with all of the KV and with half of it, side by side"),
    "up": ("lmcache_stream.serving.up", "start an LMCache server and a vLLM that fit together"),
    "doctor": ("lmcache_stream.serving.doctor", "check a vLLM and its LMCache server, and say what to change"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments after the program's name; None for those of the process.

    Returns:
        0, 1 when the command failed, 2 when it was called wrongly, 130 when Ctrl-C ended it. The reason is one line on
        standard error. `--help`, `--version` and arguments that do not parse end in `SystemExit`.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return _end("interrupted", INTERRUPTED)


def _run(arguments: list[str]) -> int:
    options = _parser(arguments).parse_args(arguments)
    from lmcache_stream.errors import LMCacheError, UsageError

    try:
        status: int | None = options.run(options)
    except UsageError as error:
        return _end(error, USAGE)
    except (LMCacheError, OSError) as error:
        return _end(error, FAILED)
    return status or OK


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lmcache-stream",
        description="Take a request's KV cache out between prefill and decode, drop or edit tokens, put it back.",
        epilog="lmcache-stream COMMAND --help tells what a command takes.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in arguments:
            loaded = importlib.import_module(module)
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    return parser


def _version() -> str:
    try:
        return version("lmcache-stream")
    except PackageNotFoundError:
        return "(not installed)"


def _end(reason: object, code: int) -> int:
    line = " ".join(str(reason).split()) or type(reason).__name__
    sys.stderr.write(f"lmcache-stream: {line}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
