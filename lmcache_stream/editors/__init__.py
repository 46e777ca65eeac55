"""Editors of KV: one method a file, all behind `Editor.edit`."""

from __future__ import annotations

from lmcache_stream.editors.base import Edit, EditInput, Editor, LayerScoring, QueryScoring, TokenDropping
from lmcache_stream.editors.compose import Compose, PerLayer
from lmcache_stream.editors.expected_attention import ExpectedAttention, QueryStatistics
from lmcache_stream.editors.h2o import H2O
from lmcache_stream.editors.keydiff import KeyDiff
from lmcache_stream.editors.knorm import Knorm
from lmcache_stream.editors.lagkv import LagKV
from lmcache_stream.editors.merge import Merge
from lmcache_stream.editors.middle_out import MiddleOut
from lmcache_stream.editors.quantize import Quantize
from lmcache_stream.editors.random import Random
from lmcache_stream.editors.registry import get, names, register
from lmcache_stream.editors.rkv import RKV
from lmcache_stream.editors.snapkv import SnapKV
from lmcache_stream.editors.streaming_llm import StreamingLLM
from lmcache_stream.editors.tova import TOVA

_EDITORS: tuple[type[Editor], ...] = (
    Compose,
    ExpectedAttention,
    H2O,
    KeyDiff,
    Knorm,
    LagKV,
    Merge,
    MiddleOut,
    PerLayer,
    Quantize,
    RKV,
    Random,
    SnapKV,
    StreamingLLM,
    TOVA,
)
for _editor in _EDITORS:
    register(_editor)

__all__ = [
    "H2O",
    "RKV",
    "TOVA",
    "Compose",
    "Edit",
    "EditInput",
    "Editor",
    "ExpectedAttention",
    "KeyDiff",
    "Knorm",
    "LagKV",
    "LayerScoring",
    "Merge",
    "MiddleOut",
    "PerLayer",
    "Quantize",
    "QueryScoring",
    "QueryStatistics",
    "Random",
    "SnapKV",
    "StreamingLLM",
    "TokenDropping",
    "get",
    "names",
    "register",
]
