"""The command line: `lmcache-stream COMMAND`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

from lmcache_stream import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["main"]

Command: TypeAlias = tuple[str, str] | dict[str, "Command"]

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

SHELLS: Final = ("bash", "zsh", "fish")

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
    "editors": ("lmcache_stream.catalogue", "list the editors: what they do, take and need"),
    "completion": ("lmcache_stream.cli", "print a script that completes commands and options in a shell"),
}
SUMMARIES = {"bench": "measure speed and quality, and compare results"}

EPILOG = """\
Begin with

  lmcache-stream demo               no server needed
  lmcache-stream up --model PATH    both servers
  lmcache-stream COMMAND --help     what a command takes

Exit status: 0 done; 1 something failed, or was found to be wrong; 2 called wrongly; 130 ended by Ctrl-C.
Colours need a terminal, and NO_COLOR not to be set."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments after the program's name; None for those of the process.

    Returns:
        0, 1 when the command failed or found something wrong, 2 when it was called wrongly, 130 when Ctrl-C ended it.
        The reason is one line on standard error. `--help`, `--version` and arguments that do not parse end in
        `SystemExit`.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    # Threads of torch that wait for work should not take the cores from others; torch reads it when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return _end("interrupted", INTERRUPTED)
    except BrokenPipeError:  # whoever read it has seen enough; the interpreter must not try to write the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(arguments: list[str]) -> int:
    from lmcache_stream.errors import LMCacheError, UsageError

    try:
        options = _parsed(arguments)
        with _alone(options):
            status: int | None = options.run(options)
        sys.stdout.flush()
    except UsageError as error:
        return _end(error, USAGE)
    except BrokenPipeError:
        raise
    except (LMCacheError, OSError) as error:
        return _end(error, FAILED)
    except ImportError as error:
        return _end(f"{error}: {_install(error)}", FAILED)
    return status or OK


def _parsed(arguments: list[str]) -> argparse.Namespace:
    options, unknown = _parser(arguments).parse_known_args(arguments)
    if unknown:
        parser: argparse.ArgumentParser = options.parser
        flag = unknown[0].startswith("-")
        parser.error(f"there is no {'' if flag else 'argument '}{unknown[0]} here{_meant(unknown[0], parser)}")
    return options


def _alone(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """What keeps standard output for the JSON object, if it was asked for there."""
    output = getattr(options, "json", None)
    return output.alone() if output is not None else contextlib.nullcontext()


def _meant(unknown: str, parser: argparse.ArgumentParser) -> str:
    """A question about the flag that is most like an unknown one."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(unknown.partition("=")[0], flags, n=1)
    behind = [action.help for action in parser._actions if str(action.metavar).startswith("-- ")]
    return f", is it {near[0]}?" if near else f" ({behind[0]})" if behind else ""


def _parser(arguments: list[str] | None) -> argparse.ArgumentParser:
    """The parser for these arguments; for None with all commands, though that imports all of them."""
    parser = _Parser(
        prog="lmcache-stream",
        description="Take a request's KV cache out between prefill and decode, drop or edit tokens, put it back.",
        epilog=EPILOG,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(parser=parser)
    _add_commands(parser, COMMANDS, arguments)
    return parser


def _add_commands(parser: argparse.ArgumentParser, commands: dict[str, Command], arguments: list[str] | None) -> None:
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in commands.items():
        summary = command[1] if isinstance(command, tuple) else SUMMARIES[name]
        subparser = subparsers.add_parser(name, help=summary, formatter_class=_Help)
        subparser.set_defaults(parser=subparser)
        if arguments is not None and name not in arguments:
            continue
        if isinstance(command, dict):
            subparser.description = summary.capitalize() + "."
            _add_commands(subparser, command, arguments)
        else:
            loaded = importlib.import_module(command[0])
            loaded.add_arguments(subparser)
            subparser.set_defaults(run=loaded.run)
        if arguments is None:
            subparser.description = summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `lmcache-stream completion` takes."""
    parser.description = (
        "Print a script that completes commands, options and names of editors. It knows the editors of now: print it "
        "again when a package with others was installed.\n\n"
        "  bash   lmcache-stream completion bash > ~/.local/share/bash-completion/completions/lmcache-stream\n"
        "  zsh    lmcache-stream completion zsh > FOLDER/_lmcache-stream, with FOLDER in $fpath\n"
        "  fish   lmcache-stream completion fish > ~/.config/fish/completions/lmcache-stream.fish"
    )
    parser.add_argument("shell", choices=SHELLS, help="whose script")


def run(options: argparse.Namespace) -> None:
    """Run `lmcache-stream completion`."""
    import shtab

    from lmcache_stream.editors import names

    parser = _parser(None)
    for action in _actions(parser):
        if action.dest in ("editor", "names"):
            action.choices = names()
        elif action.type is Path or action.metavar in ("FILE", "PATH", "A.json", "B.json"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in ("FOLDER", "DIR"):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, options.shell) + "\n")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; {self.prog} --help tells what it takes\n")


class _Help(argparse.HelpFormatter):
    """Wraps what is said about a command to the terminal; indented lines, which are examples, stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        paragraph: list[str] = []
        for line in [*text.splitlines(), ""]:
            if line.strip() and not line.startswith("  "):
                paragraph.append(line)
                continue
            lines += textwrap.wrap(" ".join(paragraph), width)
            paragraph.clear()
            lines.append(line)
        return "\n".join(indent + line for line in lines[:-1])


def _install(error: ImportError) -> str:
    if error.name and not error.name.startswith("lmcache_stream"):
        return (
            f"install what {error.name} is part of, or the package with all of its extras: "
            "pip install 'lmcache-stream[engine,grpc,bench]'"
        )
    return "the installation is broken: pip install --force-reinstall --no-deps lmcache-stream"


def _end(reason: object, code: int) -> int:
    said = str(reason).strip()
    if "\n  " not in said:  # indented lines are commands to copy
        said = " ".join(said.split())
    sys.stderr.write(f"lmcache-stream: {said or type(reason).__name__}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
