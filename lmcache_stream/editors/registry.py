"""Editors by name, in which underscores count as hyphens."""

from __future__ import annotations

import difflib
import inspect
from importlib.metadata import entry_points
from typing import Any, Final, TypeVar

from lmcache_stream.editors.base import Editor
from lmcache_stream.editors.parameters import check_parameters, takes_editor
from lmcache_stream.errors import UsageError

__all__ = ["ENTRY_POINTS", "canonical", "find", "get", "names", "register"]

ENTRY_POINTS: Final = "lmcache_stream.editors"
"""Group of entry points under which other packages offer editors: name = "package.module:Class"."""

E = TypeVar("E", bound=Editor)

_EDITORS: dict[str, type[Editor]] = {}


def canonical(name: str) -> str:
    """An editor's name as `names` spells it, with hyphens for underscores."""
    return name.replace("_", "-")


def register(editor: type[E]) -> type[E]:
    """Make an editor class known under its `name`; usable as a decorator.

    Raises:
        UsageError: It is no editor, has no name, or another class has that name.
    """
    _check_class(editor, repr(editor))
    if not editor.name:
        raise UsageError(f"{editor.__name__} has no name: set the class attribute `name`")
    known = _EDITORS.setdefault(canonical(editor.name), editor)
    if known is not editor:
        raise UsageError(f"the name {editor.name!r} belongs to {known.__name__} already")
    return editor


def names() -> list[str]:
    """Names of all editors, sorted: the package's own, registered ones and those of entry points."""
    return sorted({*_EDITORS, *(canonical(point.name) for point in entry_points(group=ENTRY_POINTS))})


def get(name: str, **params: Any) -> Editor:
    """Make the editor called `name` (underscores count as hyphens) with its parameters.

    Where a parameter is itself an editor, such as that of merge, a name stands for that editor with its defaults.

    Raises:
        UsageError: No such editor or parameter, and the message lists the choices; or a parameter takes something else.
    """
    editor = find(name)
    for key, value in params.items():
        if isinstance(value, str) and takes_editor(editor, key):
            params[key] = get(value)
    check_parameters(editor, params)
    try:
        return editor(**params)
    except TypeError as error:
        raise UsageError(f"{editor.name}: {error}") from error


def find(name: str) -> type[Editor]:
    """The class of the editor called `name`.

    Raises:
        UsageError: No such editor; the message lists the choices. Or what an entry point names is none.
    """
    if canonical(name) in _EDITORS:
        return _EDITORS[canonical(name)]
    for point in entry_points(group=ENTRY_POINTS):
        if canonical(point.name) == canonical(name):
            return _check_class(point.load(), f"entry point {point.name!r} ({point.value})")
    near = difflib.get_close_matches(canonical(name).lower(), names(), 1)
    raise UsageError(
        f"no editor is called {name!r}: choose from {', '.join(names())}{f'; is it {near[0]}?' if near else ''}"
    )


def _check_class(found: object, what: str) -> type[Editor]:
    if not (inspect.isclass(found) and issubclass(found, Editor)):
        raise UsageError(f"{what} is no subclass of Editor")
    return found
