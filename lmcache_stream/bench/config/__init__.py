"""The options of `bench serve`: arguments of Python over flags over environment over a file."""

from __future__ import annotations

from lmcache_stream.bench.config.options import METRICS, ServeOptions
from lmcache_stream.bench.config.sources import add_flags, load_options
from lmcache_stream.bench.config.words import EditorSpec

__all__ = ["METRICS", "EditorSpec", "ServeOptions", "add_flags", "load_options"]
