"""What a server says in `/config` and `/status`, as recorded and as made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HTTP = Path(__file__).parents[2] / "data" / "http"
MODEL = "models/tiny"


def recorded(name: str) -> Any:
    return json.loads((HTTP / f"{name}.json").read_bytes())


def pulled(
    *groups: Mapping[str, Any], num_layers: int = 4, per_token: int | None = None, world_size: int = 1
) -> dict[str, Any]:
    """A `/status` with the given kernel groups."""
    layout = {"num_layers": num_layers, "cache_size_per_token": per_token, "kernel_groups": list(groups)}
    entry = {"model_name": MODEL, "world_size": world_size, "kv_cache_layout": layout}
    return {"cache_context_meta": {str(i): entry for i in range(world_size)}, "non_cuda_context_meta": {}}


def group(name: str, shape: str, *, num_layers: int = 4, dtype: str = "torch.bfloat16") -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "tokens_per_block": 16,
        "dtype": dtype,
        "engine_kv_format": name,
        "engine_kv_concrete_shape": shape,
    }
