"""What every editor of KV shares: score -> select -> gather -> re-rotate."""

from __future__ import annotations

from lmcache_stream.editors.base.dropping import Aggregate, Scope, TokenDropping
from lmcache_stream.editors.base.editor import Edit, EditInput, Editor
from lmcache_stream.editors.base.scoring import Layer, LayerScoring, QueryScoring

__all__ = [
    "Aggregate",
    "Edit",
    "EditInput",
    "Editor",
    "Layer",
    "LayerScoring",
    "QueryScoring",
    "Scope",
    "TokenDropping",
]
