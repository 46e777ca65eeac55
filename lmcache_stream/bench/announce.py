"""What a benchmark's commands tell on standard error while they work."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["find_smollm2", "say"]


def say(line: str) -> None:
    """Tell a line."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def find_smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; fetching it is announced, since that takes a while."""
    from lmcache_stream.engine import ensure_smollm2

    return ensure_smollm2(announce=say)
