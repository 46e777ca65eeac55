"""The edits that are measured: editors with their parameters, scopes and kept ratios."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lmcache_stream import editors
from lmcache_stream.bench.config import EditorSpec
from lmcache_stream.editors import Editor, LayerScoring, TokenDropping, registry
from lmcache_stream.errors import UsageError

__all__ = ["COMBINATORS", "LeftOut", "Variant", "default_variants", "make_variants"]

COMBINATORS: Final = frozenset({"compose", "per-layer"})
"""Editors made of others: measured when named, as they mean nothing by themselves."""


@dataclass(frozen=True)
class Variant:
    """One edit.

    Args:
        method: The editor's name, with the parameters it was given.
        editor: The editor.
        keep: Ratio or count it keeps; None for editors that keep every token.
        scope: "shared", "layer" or "head"; None where the editor has no scope.
    """

    method: str
    editor: Editor
    keep: float | int | None
    scope: str | None

    @property
    def label(self) -> str:
        """Method, scope and budget, such as `snapkv/head/0.5`."""
        return "/".join(str(part) for part in (self.method, self.scope, self.keep) if part is not None)

    @property
    def definition(self) -> str:
        """All parameters: variants of equal definition measure the same."""
        return defined(self.editor)


@dataclass(frozen=True)
class LeftOut:
    """What was not measured, and why."""

    what: str
    why: str


def make_variants(
    specs: Sequence[str], *, scopes: Sequence[str], keeps: Sequence[float | int], window: int, seed: int
) -> list[Variant]:
    """Cross editors `NAME` or `NAME:k=v,...` with scopes and budgets.

    A method whose scores are the same in all layers and heads has only the shared scope, unless its spec names another.
    `window` and `seed` go to every editor that has them, unless its spec names others.

    Raises:
        UsageError: No such editor or parameter, or two specs make the same.
    """
    made: dict[str, Variant] = {}
    for spec in specs:
        for variant in _crossed(spec, scopes, keeps, window, seed):
            if variant.label in made:
                raise UsageError(f"{variant.label} is asked for twice")
            made[variant.label] = variant
    return list(made.values())


def default_variants(
    *, scopes: Sequence[str], keeps: Sequence[float | int], window: int, seed: int
) -> tuple[list[Variant], list[LeftOut]]:
    """All editors that are known by name and work with their defaults; the others are listed."""
    found: list[Variant] = []
    left_out: list[LeftOut] = []
    for name in editors.names():
        if name in COMBINATORS:
            left_out.append(LeftOut(name, "it is made of other editors"))
            continue
        try:
            found += make_variants([name], scopes=scopes, keeps=keeps, window=window, seed=seed)
        except UsageError as error:
            left_out.append(LeftOut(name, str(error)))
    return found, left_out


def _crossed(spec: str, scopes: Sequence[str], keeps: Sequence[float | int], window: int, seed: int) -> list[Variant]:
    asked = EditorSpec.parse(spec)
    name, given = registry.canonical(asked.name), asked.params
    own = {key: value for key, value in given.items() if key not in ("keep", "scope")}
    method = ",".join([name, *(f"{key}={value}" for key, value in own.items())])
    editor = editors.get(name, **own)
    dropping = _dropping(editor)
    if dropping is None:
        if len(own) < len(given):
            raise UsageError(f"{name} keeps every token: {spec!r} cannot give it keep or scope")
        return [Variant(method, _filled(editor, own, seed=seed), None, None)]
    if "scope" in given:
        scopes = [given["scope"]]
    elif not isinstance(dropping, LayerScoring):
        scopes = [dropping.scope]
    if "keep" in given:
        keeps = [given["keep"]]
    return [
        Variant(method, _filled(editor, own, window=window, seed=seed, keep=keep, scope=scope), keep, scope)
        for keep in keeps
        for scope in scopes
    ]


def _dropping(editor: Editor) -> TokenDropping | None:
    if isinstance(editor, TokenDropping):
        return editor
    inner = getattr(editor, "editor", None)
    return inner if isinstance(inner, TokenDropping) else None


def _filled(editor: Editor, given: dict[str, Any], **values: Any) -> Editor:
    """The editor with those of `values` that it has and that were not given."""
    inner = _dropping(editor)
    changes: dict[str, Any]
    if inner is not None and inner is not editor:
        changes = {"editor": _filled(inner, {}, **values)}
    else:
        known = {field.name for field in dataclasses.fields(editor) if field.init}
        changes = {name: value for name, value in values.items() if name in known - set(given)}
    return dataclasses.replace(editor, **changes)


def defined(editor: Editor) -> str:
    parts = []
    for field in dataclasses.fields(editor):
        value = getattr(editor, field.name)
        if field.name != "geometry":
            parts.append(f"{field.name}={defined(value) if isinstance(value, Editor) else repr(value)}")
    return f"{editor.label}({', '.join(parts)})"
