"""`lmcache-stream editors`: which editors there are, what they take and what they need."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import re
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, get_args

from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lmcache_stream.console import add_json_flag, open_console
from lmcache_stream.editors import registry
from lmcache_stream.editors.base import Editor, Scope
from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console

__all__ = ["Method", "Parameter", "add_arguments", "describe", "run"]

PAPER: Final = re.compile(r"arXiv:\d{4}\.\d{5}")
NEEDS: Final = {
    "queries": "the prompt's queries, which the embedded engine offers and vLLM does not",
    "heads": "the number of KV heads",
    "rotary": "the model's rotary positions",
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of an editor.

    Args:
        name: Its name.
        type: Its annotation, as it is written.
        default: What it is when it is not given, ready for JSON; a method goes by its name.
        about: What it does; empty where the editor does not say.
    """

    name: str
    type: str
    default: Any
    about: str


@dataclass(frozen=True)
class Method:
    """An editor, as its class describes it.

    Args:
        name: Its name.
        summary: What it does, in a sentence.
        about: More of that, by paragraphs; empty where there is no more.
        parameters: What it takes, but for the geometry, which streams bring.
        scopes: Where it can select tokens; empty for editors that select none.
        needs: What it cannot do without: "queries", "heads", "rotary".
        papers: Where it comes from.
        module: Where its code is.
        problem: Why it cannot be used, for a plug-in that does not load; else None.
    """

    name: str
    summary: str
    about: list[str]
    parameters: list[Parameter]
    scopes: list[str]
    needs: list[str]
    papers: list[str]
    module: str
    problem: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `lmcache-stream editors` takes."""
    parser.description = (
        "List the editors of KV: this package's, and those that other installed packages offer. With names, show "
        "these in full.\n\n"
        "An editor is named with its parameters as in\n\n"
        "  lmcache-stream bench serve --editor snapkv:keep=0.5,window=16"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="editors to show in full")
    add_json_flag(parser)


def run(options: argparse.Namespace) -> int:
    """Run `lmcache-stream editors`; 1 when a plug-in does not load.

    Raises:
        UsageError: No editor has such a name; the message lists the choices.
    """
    known = {name: _described(name) for name in registry.names()}
    wanted = [registry.canonical(name) for name in options.names] or list(known)
    for name in wanted:
        if name not in known:
            registry.find(name)  # raises, with the choices
    methods = [known[name] for name in dict.fromkeys(wanted)]
    if options.json is not None:
        options.json.write({"editors": [asdict(method) for method in methods]})
    else:
        console = open_console()
        for method in methods:
            _show(method, console) if options.names else _list(method, console)
    return int(any(method.problem for method in methods))


def describe(editor: type[Editor]) -> Method:
    """What an editor's class says of itself."""
    summary, *about = _paragraphs(inspect.getdoc(editor) or "")
    arguments = _arguments(editor)
    fields = [field for field in dataclasses.fields(editor) if field.init and field.name != "geometry"]
    needs = editor.needs | ({"rotary"} if getattr(editor, "rerotate", False) else set())
    return Method(
        name=editor.name,
        summary=summary,
        about=about,
        parameters=[
            Parameter(field.name, str(field.type), _default(field), arguments.get(field.name, "")) for field in fields
        ],
        scopes=_scopes(editor),
        needs=[need for need in NEEDS if need in needs] + sorted(needs - NEEDS.keys()),
        papers=list(dict.fromkeys(PAPER.findall("\n".join([summary, *about])))),
        module=editor.__module__,
    )


def _described(name: str) -> Method:
    try:
        return describe(registry.find(name))
    except Exception as error:  # a plug-in's own code was imported
        problem = f"{type(error).__name__}: {error}"
        return Method(name, "A plug-in that cannot be loaded.", [], [], [], [], [], "", problem)


def _paragraphs(doc: str) -> list[str]:
    """A docstring up to its first section, one string a paragraph."""
    words = re.split(r"^(?:Args|Attributes|Raises|Returns):$", doc, maxsplit=1, flags=re.MULTILINE)[0]
    return [" ".join(paragraph.split()) for paragraph in words.split("\n\n") if paragraph.strip()] or [""]


def _arguments(editor: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say under `Args:`; the class itself counts most."""
    found: dict[str, str] = {}
    for base in reversed(editor.__mro__):
        doc = inspect.cleandoc(base.__doc__ or "")
        section = re.search(r"^Args:\n((?: .*\n?|\n)*)", doc, re.MULTILINE)
        if section:
            for name, about in re.findall(r"^(\w+): (.*(?:\n +.*)*)", textwrap.dedent(section[1]), re.MULTILINE):
                found[name] = " ".join(about.split())
    return found


def _scopes(editor: type[Editor]) -> list[str]:
    """The scopes that the class takes, tried; all of them for one that cannot be made without further parameters."""
    if "scope" not in {field.name for field in dataclasses.fields(editor)}:
        return []
    make: Callable[..., Editor] = editor
    taken = []
    for scope in get_args(Scope):
        with contextlib.suppress(UsageError):
            make(scope=scope)
            taken.append(scope)
    return taken or list(get_args(Scope))


def _default(field: dataclasses.Field[Any]) -> Any:
    value = field.default
    if value is dataclasses.MISSING:
        value = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    return _plain(value)


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return value.name if isinstance(value, Editor) else repr(value)


def _list(method: Method, console: Console) -> None:
    """A method in a few lines."""
    console.print(Text(method.name, style="bold"))
    lines: Mapping[str, str] = {
        "takes": ", ".join(f"{one.name}={_written(one.default)}" for one in method.parameters),
        "scopes": ", ".join(method.scopes),
        "needs": ", ".join(method.needs),
        "paper": ", ".join(method.papers),
    }
    body = Table.grid(padding=(0, 2))
    body.add_column(no_wrap=True, style="dim")
    body.add_column(overflow="fold")
    for name, value in lines.items():
        if value:
            body.add_row(name, Text(value))
    console.print(Padding(Text(method.problem or method.summary), (0, 0, 0, 2)))
    if body.row_count:
        console.print(Padding(body, (0, 0, 0, 2)))
    console.print()


def _show(method: Method, console: Console) -> None:
    """All that is known of a method."""
    console.print(Text(method.name, style="bold"))
    for line in _prose(method):
        console.print()
        console.print(Text(line))
    if method.parameters:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title="Parameters", title_justify="left", show_edge=False)
        for heading in ("Name", "Default", "What it does"):
            table.add_column(heading, overflow="fold", no_wrap=heading == "Name")
        for one in method.parameters:
            table.add_row(Text(one.name), Text(_written(one.default)), Text(one.about or one.type))
        console.print()
        console.print(table)
    console.print()


def _prose(method: Method) -> Iterator[str]:
    yield method.summary
    yield from method.about
    if method.problem:
        yield method.problem
    if method.scopes:
        yield f"Selects tokens by scope: {', '.join(method.scopes)}."
    if method.needs:
        yield f"Needs {'; '.join(NEEDS.get(need, need) for need in method.needs)}."
    if method.module:
        yield f"Code: {method.module}."


def _written(default: Any) -> str:
    """A default as it would be written on the command line."""
    if default is None or isinstance(default, str):
        return default or "none"
    return json.dumps(default)
