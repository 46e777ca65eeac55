"""The KV's geometry, put together from what the server, the caller and the model's configuration say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_stream.errors import GeometryError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.codec import format_kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_stream.kvcache.mp.status import ModelLayout, ServerFacts

__all__ = ["find_model_config", "resolve_geometry"]

# What a caller may tell otherwise than the model's configuration does.
_CORRECTABLE = frozenset({"rotary", "rotary_unknown", "layer_types", "num_heads"})


def resolve_geometry(
    facts: ServerFacts,
    *,
    given: KVGeometry | None = None,
    config: KVGeometry | None = None,
    config_name: str = "config.json",
) -> KVGeometry | None:
    """Put together what the server, the caller and the model's configuration say of the KV.

    The server's word counts where it gives one, then the caller's, then the configuration's. The data type of a
    configuration is left out: an engine may run the model in another.

    Returns:
        The geometry; None if layers, heads or head size are known from nobody.

    Raises:
        GeometryError: Two of them contradict each other; the message says which said what.
    """
    layout = facts.model
    said: list[tuple[str, dict[str, Any]]] = [
        (
            f"{facts.http_url}/status",
            {
                "num_layers": layout.num_layers,
                "num_kv_heads": layout.num_kv_heads and _all_ranks(layout),
                "head_dim": layout.head_dim,
                "dtype": layout.dtype,
                "chunk_size": facts.chunk_size,
                "block_size": layout.block_size,
                "planes": _planes(layout),
            },
        )
    ]
    shape = ("num_layers", "num_kv_heads", "head_dim", "planes", "num_heads", "rotary", "rotary_unknown", "layer_types")
    if given is not None:
        names = (*shape, "dtype", "chunk_size", "block_size")
        said.append(("geometry=", {name: getattr(given, name) for name in names}))
    if config is not None:
        said.append((config_name, {name: getattr(config, name) for name in shape}))

    known: dict[str, Any] = {}
    source: dict[str, str] = {}
    for who, values in said:
        for name, value in values.items():
            if value is None:
                continue
            if name not in known:
                known[name], source[name] = value, who
            elif name not in _CORRECTABLE and known[name] != value:
                raise GeometryError(f"{name} is {known[name]} by {source[name]}, but {value} by {who}")
    if given is not None and given.world_size not in (1, layout.world_size):
        raise GeometryError(
            f"world_size is {layout.world_size} by {facts.http_url}/status, but {given.world_size} by geometry="
        )

    block_size = known.get("block_size")
    if block_size and facts.chunk_size % block_size:
        raise GeometryError(
            f"the chunk size {facts.chunk_size} by {facts.http_url}/config is no multiple of the block size "
            f"{block_size} by {source['block_size']}: start the cache server with another --chunk-size"
        )
    if not {"num_layers", "num_kv_heads", "head_dim"} <= known.keys():
        return None
    if known.get("rotary") is not None:
        known.pop("rotary_unknown", None)
    alibi = any(one is not None and one.alibi for one in (given, config))
    geometry = KVGeometry(world_size=layout.world_size, alibi=alibi, **known)
    _check_width(layout, geometry, source, facts.http_url)
    return geometry


def _all_ranks(layout: ModelLayout) -> int | None:
    if layout.num_kv_heads is None:
        return None
    return 1 if _planes(layout) == 1 else layout.num_kv_heads * layout.world_size


def _planes(layout: ModelLayout) -> int | None:
    if not layout.formats:
        return 2 if layout.one_plane is False else None
    return 1 if format_kind(layout.formats[0]) == "mla" else 2


def _check_width(layout: ModelLayout, geometry: KVGeometry, source: Mapping[str, str], http_url: str) -> None:
    if layout.width is None:
        return
    of_rank = geometry.hidden_dim if geometry.planes == 1 else 2 * geometry.hidden_dim // geometry.world_size
    if of_rank != layout.width:
        raise GeometryError(
            f"{http_url}/status tells {layout.width} stored values for a token and layer of each rank, but "
            f"{geometry.num_kv_heads} KV heads ({source['num_kv_heads']}) of {geometry.head_dim} "
            f"({source['head_dim']}) over {geometry.world_size} ranks make {of_rank}"
        )


def find_model_config(model_name: str) -> Path | None:
    """Find the `config.json` of a model whose name is a local path; None where there is none."""
    try:
        path = Path(model_name).expanduser() / "config.json"
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # a name need not be a path at all
        return None
