"""Editors as commands ask for them, and what they drop, by themselves or by editors inside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

from lmcache_stream.bench.config import EditorSpec
from lmcache_stream.editors import Editor, TokenDropping, registry
from lmcache_stream.errors import UsageError

__all__ = ["droppers", "filled", "kept_tokens", "make_editor"]

PASSED_ON: Final = ("keep", "scope")
"""What an editor that has no such parameter passes on to the one inside it that drops tokens."""


def make_editor(asked: EditorSpec) -> Editor:
    """Make an editor; `keep` and `scope` may be meant for the one inside it that drops tokens, such as that of merge.

    Raises:
        UsageError: No such editor or parameter, a parameter takes something else, or there is not one inside to take
            `keep` or `scope`.
    """
    known = _parameters(registry.find(asked.name))
    passed = {key: value for key, value in asked.params.items() if key in PASSED_ON and key not in known}
    editor = registry.get(asked.name, **{key: value for key, value in asked.params.items() if key not in passed})
    dropping = len(droppers(editor))
    if passed and dropping != 1:
        what = f"has {dropping} editors inside that drop tokens" if dropping else "keeps every token"
        raise UsageError(f"{editor.label} {what}: it takes no {' and no '.join(passed)}")
    return filled(editor, **passed)


def droppers(editor: Editor) -> list[TokenDropping]:
    """The editor itself if it drops tokens, or else those inside it that do, in order."""
    if isinstance(editor, TokenDropping):
        return [editor]
    return [one for inner in _inside(editor).values() for each in inner for one in droppers(each)]


def kept_tokens(editor: Editor, tokens: int) -> int:
    """About how many of `tokens` an editor keeps, before its budget is rounded to chunks."""
    for one in droppers(editor):
        tokens = int(tokens * one.keep) if isinstance(one.keep, float) else min(tokens, one.keep)
    return tokens


def filled(editor: Editor, given: Iterable[str] = (), **values: Any) -> Editor:
    """The editor with those of `values` that it has and that were not `given`; or those inside it with them."""
    inside = {} if isinstance(editor, TokenDropping) else _inside(editor)
    if not inside:
        free = set(_parameters(type(editor))).difference(given)
        return dataclasses.replace(editor, **{name: value for name, value in values.items() if name in free})
    changes: dict[str, Any] = {}
    for name, inner in inside.items():
        made = tuple(filled(one, **values) for one in inner)
        changes[name] = made if isinstance(getattr(editor, name), tuple) else made[0]
    return dataclasses.replace(editor, **changes)


def _inside(editor: Editor) -> dict[str, tuple[Editor, ...]]:
    """The editors that an editor is made of, by parameter."""
    values = {name: getattr(editor, name) for name in _parameters(type(editor))}
    several = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}
    return {name: value for name, value in several.items() if value and all(isinstance(one, Editor) for one in value)}


def _parameters(editor: type[Editor]) -> list[str]:
    return [field.name for field in dataclasses.fields(editor) if field.init]
