"""An engine in this process: a Hugging Face model behind the HTTP API that vLLM has. Needs the extra `engine`."""

from __future__ import annotations

from lmcache_stream.engine.embedded import EmbeddedEngine
from lmcache_stream.engine.smollm2 import ensure_smollm2

__all__ = ["EmbeddedEngine", "ensure_smollm2"]
