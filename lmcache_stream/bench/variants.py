"""The edits that are measured: editors with their parameters, scopes and kept ratios."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lmcache_stream import editors
from lmcache_stream.bench.config import EditorSpec
from lmcache_stream.bench.dropping import droppers, filled, make_editor
from lmcache_stream.editors import Editor, LayerScoring, registry
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
    editor = make_editor(asked)
    own = {key: value for key, value in asked.params.items() if key not in ("keep", "scope")}
    method = ",".join([registry.canonical(asked.name), *(f"{key}={value}" for key, value in own.items())])
    dropping = droppers(editor)
    if len(dropping) != 1:
        return [Variant(method, filled(editor, own, seed=seed), None, None)]
    if "scope" in asked.params or not isinstance(dropping[0], LayerScoring):
        scopes = [dropping[0].scope]
    if "keep" in asked.params:
        keeps = [dropping[0].keep]
    return [
        Variant(method, filled(editor, own, window=window, seed=seed, keep=keep, scope=scope), keep, scope)
        for keep in keeps
        for scope in scopes
    ]


def defined(editor: Editor) -> str:
    parts = []
    for field in dataclasses.fields(editor):
        value = getattr(editor, field.name)
        if field.name != "geometry":
            parts.append(f"{field.name}={defined(value) if isinstance(value, Editor) else repr(value)}")
    return f"{editor.label}({', '.join(parts)})"
