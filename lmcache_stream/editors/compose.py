"""Editors made of editors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from lmcache_stream.editors import registry
from lmcache_stream.editors.base import Edit, EditInput, Editor, Scope, TokenDropping
from lmcache_stream.editors.keydiff import KeyDiff
from lmcache_stream.errors import UsageError

__all__ = ["Compose", "PerLayer"]


@dataclass(frozen=True, kw_only=True)
class Compose(Editor):
    """Runs editors one after another.

    The queries of the prompt fit its KV only until tokens are dropped, so methods that need them come first.

    Args:
        editors: At least one editor, or name of an editor with its defaults.
    """

    name: ClassVar[str] = "compose"

    editors: tuple[Editor | str, ...] = ()

    def __post_init__(self) -> None:
        made = tuple(registry.get(one) if isinstance(one, str) else one for one in self.editors)
        if not made or not all(isinstance(one, Editor) for one in made):
            raise UsageError(f"compose needs editors, or names of editors, not {self.editors!r}")
        dropped = False
        for one in made:
            if dropped and "queries" in one.needs:
                raise UsageError(f"{one.label} needs the prompt's queries: compose it before what drops tokens")
            dropped = dropped or not one.keeps_all
        object.__setattr__(self, "editors", made)
        object.__setattr__(self, "needs", frozenset[str]().union(*(one.needs for one in made)))

    def edit(self, x: EditInput) -> Edit:
        """Edit with one after another; `asked` is the last budget, `kept_positions` those in `x`."""
        x = self._prepared(x)
        edit = Edit(kv=x.kv, tokens=x.tokens, kept_positions=torch.arange(len(x.tokens), device=x.kv.device))
        for editor in self.editors:
            assert isinstance(editor, Editor)
            queries = x.queries if len(edit.tokens) == len(x.tokens) else None
            spent = x.spent or _apart(edit.kv, x.kv)
            then = editor.edit(replace(x, kv=edit.kv, tokens=edit.tokens, queries=queries, spent=spent))
            asked = edit.asked if then.asked is None else then.asked
            edit = replace(then, kept_positions=_chain(edit.kept_positions, then.kept_positions), asked=asked)
        return edit


@dataclass(frozen=True, kw_only=True)
class PerLayer(TokenDropping):
    """Rates the tokens of each layer by a method of its own; all layers keep equally many.

    What one of the methods protects is kept in all layers; budgets and scopes of methods count for nothing here.

    Args:
        default: The method of layers that `layers` does not name.
        layers: Method by layer index.
    """

    name: ClassVar[str] = "per-layer"

    scope: Scope = "layer"
    default: TokenDropping = field(default_factory=KeyDiff)
    layers: Mapping[int, TokenDropping] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(isinstance(one, TokenDropping) for one in self._methods):
            raise UsageError("per-layer needs editors that drop tokens")
        if any(isinstance(one, PerLayer) for one in self._methods):
            raise UsageError("per-layer takes no per-layer inside")
        if self.scope == "shared":
            raise UsageError('per-layer schedules need scope="layer" or scope="head"')
        object.__setattr__(self, "needs", frozenset[str]({"heads"}).union(*(one.needs for one in self._methods)))

    @property
    def _methods(self) -> tuple[TokenDropping, ...]:
        return self.default, *self.layers.values()

    def score(self, x: EditInput, budget: int) -> torch.Tensor:
        """Each layer's scores by its own method, those of its heads on one scale."""
        layers, heads = x.kv.shape[1], self._require_heads(x).num_kv_heads
        beyond = [index for index in self.layers if not 0 <= index < layers]
        if beyond:
            raise UsageError(f"per-layer names layers {beyond} of a model with {layers}")
        scores = torch.empty(layers, heads, len(x.tokens), device=x.kv.device)
        for method in dict.fromkeys(self._methods):
            mine = [index for index in range(layers) if self.layers.get(index, self.default) == method]
            if mine:
                scored = method._comparable(method.score(x, budget))
                scores[mine] = scored.expand(layers, heads, -1)[mine]
        return scores

    def _protected(self, total: int) -> torch.Tensor:
        mask = super()._protected(total)
        for method in self._methods:
            mask |= method._protected(total)  # a score need not make sense where its method protects
        return mask


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether no byte belongs to the memory of both."""
    first, second = one.untyped_storage(), other.untyped_storage()
    return (
        first.data_ptr() + first.nbytes() <= second.data_ptr()
        or second.data_ptr() + second.nbytes() <= first.data_ptr()
    )


def _chain(first: torch.Tensor | None, then: torch.Tensor | None) -> torch.Tensor | None:
    """Positions in the first input of what both edits kept."""
    if first is None or then is None:
        return None
    dims = max(first.dim(), then.dim())
    first, then = _by_layer_and_head(first), _by_layer_and_head(then)
    layers, heads = max(first.shape[0], then.shape[0]), max(first.shape[1], then.shape[1])
    both = first.expand(layers, heads, -1).gather(-1, then.expand(layers, heads, -1))
    return both[0, 0] if dims == 1 else both[:, 0] if dims == 2 else both


def _by_layer_and_head(kept: torch.Tensor) -> torch.Tensor:
    """Bring kept positions of any scope to `[L | 1, H | 1, n]`."""
    return kept[None, None] if kept.dim() == 1 else kept[:, None] if kept.dim() == 2 else kept
