"""Everything that `lmcache-stream doctor` may ask of a user, read from its source."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from lmcache_stream.serving import doctor

POSITION = {"Fails": 1, "warns": 1, "Result": 2}


@dataclass(frozen=True)
class Remedy:
    """One thing to do.

    Args:
        place: Where doctor's source says it.
        parts: Its words, without what is filled in between them.
    """

    place: str
    parts: tuple[str, ...]


def remedies() -> Iterator[Remedy]:
    for part in pkgutil.iter_modules(doctor.__path__, f"{doctor.__name__}."):
        yield from remedies_of(importlib.import_module(part.name))


def remedies_of(module: ModuleType) -> Iterator[Remedy]:
    tree = ast.parse(inspect.getsource(module))
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for scope in scopes:
        names = {
            target.id: node.value
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(scope):
            for said in spoken(node):
                found = names.get(said.id, said) if isinstance(said, ast.Name) else said
                for choice in (found.body, found.orelse) if isinstance(found, ast.IfExp) else (found,):
                    if parts := words(choice, module):
                        yield Remedy(f"{module.__name__}:{node.lineno}", parts)  # type: ignore[attr-defined]


def spoken(node: ast.AST) -> Iterator[ast.expr]:
    """The remedies that a call is given."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield from (keyword.value for keyword in node.keywords if keyword.arg == "remedy")
        at = POSITION.get(node.func.id)
        if at is not None and len(node.args) > at:
            yield node.args[at]


def words(value: ast.expr, module: ModuleType) -> tuple[str, ...]:
    match value:
        case ast.Constant(str(text)):
            return (text,) if text else ()
        case ast.Name(name) if isinstance(getattr(module, name, None), str):
            return (getattr(module, name),)
        case ast.FormattedValue(inner):
            return words(inner, module)
        case ast.JoinedStr(values):
            joined: list[str] = []
            glue = False
            for each in values:
                found = words(each, module)
                whole = isinstance(each, ast.Constant) or bool(found)
                if glue and whole and joined:
                    joined[-1] += "".join(found)
                else:
                    joined += found
                glue = whole
            return tuple(joined)
        case _:
            return ()
