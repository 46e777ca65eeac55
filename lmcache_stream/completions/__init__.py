"""Tokens out of an engine."""

from __future__ import annotations

from lmcache_stream.completions.client import CompletionsClient, ModelCard
from lmcache_stream.completions.sse import CompletionDecoder

__all__ = ["CompletionDecoder", "CompletionsClient", "ModelCard"]
