"""What an editor's parameters take: what the fields of its class are annotated with."""

from __future__ import annotations

import dataclasses
import numbers
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lmcache_stream.editors.base import Editor
from lmcache_stream.errors import UsageError

__all__ = ["check_parameters", "takes_editor"]


def check_parameters(editor: type[Editor], given: dict[str, Any]) -> None:
    """Refuse parameters that the editor's class has not, or of another type than its annotation.

    Raises:
        UsageError: The message names the editor, the parameter and what it takes.
    """
    fields = {field.name: field for field in dataclasses.fields(editor) if field.init}
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise UsageError(f"{editor.name} has no parameter {', '.join(unknown)}: choose from {', '.join(fields)}")
    hints = _hints(editor)
    for name, value in given.items():
        hint = hints.get(name, Any)
        if not _fits(value, hint):
            choices = get_args(hint) if get_origin(hint) is Literal else ()
            taken = f"one of {', '.join(map(str, choices))}" if choices else fields[name].type
            raise UsageError(f"{editor.name}: {name} takes {taken}, not {value!r}")


def takes_editor(editor: type[Editor], parameter: str) -> bool:
    """Whether a parameter is itself an editor."""
    hint = _hints(editor).get(parameter)
    return isinstance(hint, type) and issubclass(hint, Editor)


def _hints(editor: type[Editor]) -> dict[str, Any]:
    try:
        return get_type_hints(editor)
    except NameError:  # a plug-in may import its types for type checkers only
        return {}


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type; a list may stand for a tuple, as JSON has no other."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return value in parts
    if kind is tuple and parts and isinstance(value, list | tuple):
        many = parts[-1] is Ellipsis
        return (many or len(value) == len(parts)) and all(
            _fits(one, part) for one, part in zip(value, parts[:1] * len(value) if many else parts, strict=True)
        )
    if hint in (int, float):
        return isinstance(value, numbers.Integral if hint is int else numbers.Real) and not isinstance(value, bool)
    try:
        return isinstance(value, kind or hint)
    except TypeError:  # only type checkers can tell, as of a protocol
        return True
