"""The command line: `lmcache-stream COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NoReturn, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

Command: TypeAlias = tuple[str, str] | dict[str, "Command"]

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

# A command is a module with `add_arguments(parser)` and `run(options)`, imported when it is named; or it has commands.
COMMANDS: dict[str, Command] = {
    "demo": ("lmcache_stream.bench.demo", "answer questions with all of the KV and with half of it, side by side"),
    "up": ("lmcache_stream.serving.up", "start an LMCache server and a vLLM that fit together"),
    "doctor": ("lmcache_stream.serving.doctor", "check a vLLM and its LMCache server, and say what to change"),
    "bench": {
        "serve": ("lmcache_stream.bench.serve", "prefill, modify and decode many prompts, in vllm bench serve's terms"),
        "quality": ("lmcache_stream.bench.quality", "measure what editors keep of a model's answers"),
        "compare": ("lmcache_stream.bench.compare", "put two result files side by side, with ratios and intervals"),
    },
}
SUMMARIES = {"bench": "measure speed and quality, and compare results"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments after the program's name; None for those of the process.

    Returns:
        0, 1 when the command failed, 2 when it was called wrongly, 130 when Ctrl-C ended it. The reason is one line on
        standard error. `--help`, `--version` and arguments that do not parse end in `SystemExit`.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    # Threads of torch that wait for work should not take the cores from others; torch reads it when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
    parser = _Parser(
        prog="lmcache-stream",
        description="Take a request's KV cache out between prefill and decode, drop or edit tokens, put it back.",
        epilog="lmcache-stream COMMAND --help tells what a command takes.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    _add_commands(parser, COMMANDS, arguments)
    return parser


def _add_commands(parser: argparse.ArgumentParser, commands: dict[str, Command], arguments: list[str]) -> None:
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in commands.items():
        summary = command[1] if isinstance(command, tuple) else SUMMARIES[name]
        subparser = subparsers.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name not in arguments:
            continue
        if isinstance(command, dict):
            subparser.description = summary.capitalize() + "."
            _add_commands(subparser, command, arguments)
        else:
            loaded = importlib.import_module(command[0])
            loaded.add_arguments(subparser)
            subparser.set_defaults(run=loaded.run)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; {self.prog} --help tells what it takes\n")


def _version() -> str:
    try:
        return version("lmcache-stream")
    except PackageNotFoundError:
        return "(not installed)"


def _end(reason: object, code: int) -> int:
    said = str(reason).strip()
    if "\n  " not in said:  # indented lines are commands to copy
        said = " ".join(said.split())
    sys.stderr.write(f"lmcache-stream: {said or type(reason).__name__}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
