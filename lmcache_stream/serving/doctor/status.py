"""What a cache server's `/status` says of what it holds, and of who is registered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_stream.kvcache.mp.status import SCRATCH_PREFIX

__all__ = ["held", "part", "scratch_clients"]


def held(status: Mapping[str, Any]) -> dict[str, int]:
    """Counts of what is held, by their names in words."""
    l1 = part(status, "storage_manager", "l1_manager")
    counts = {
        "sessions": status.get("active_sessions"),
        "lookups": status.get("active_prefetch_jobs"),
        "chunks locked for reading": l1.get("read_locked_count"),
        "chunks locked for writing": l1.get("write_locked_count"),
    }
    return {name: count for name, count in counts.items() if isinstance(count, int)}


def scratch_clients(status: Mapping[str, Any]) -> set[str]:
    """Ids of the clients that have registered under scratch names, as this package does."""
    clients = part(status, "non_cuda_context_meta")
    return {one for one in clients if str(part(clients, one).get("model_name", "")).startswith(SCRATCH_PREFIX)}


def part(value: Any, *keys: str) -> Mapping[str, Any]:
    """The map at a path of keys; empty where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}
