"""What an LMCache MP server says about itself in `/config` and `/status`.

`/config` tells chunk size, shared memory and transfer mode; `/status` tells which engines are registered and, where the
server pulls their KV, in which block format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmcache_stream.errors import CacheConnectionError, CacheProtocolError, GeometryError
from lmcache_stream.kvcache.mp.codec import format_kind
from lmcache_stream.kvcache.mp.pool import DTYPES

if TYPE_CHECKING:
    import torch

__all__ = [
    "QUERY_SUFFIX",
    "SCRATCH_PREFIX",
    "ModelLayout",
    "ServerConfig",
    "ServerFacts",
    "ServerState",
    "parse_config",
    "parse_status",
]

# Names under which clients register; no engine serves them.
SCRATCH_PREFIX = "lmcache-stream:"

# Query tensors lie under the model's name with this after it.
QUERY_SUFFIX = "##query"

# A server that says more than these is none: what depends on such a number would never end.
_MOST_CHUNK_TOKENS = 1 << 20
_MOST_RANKS = 1 << 10
_MOST = 1 << 31

# Characters of a list of names in a message.
_MOST_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What `/config` says.

    Args:
        chunk_size: Tokens a chunk.
        transfer_mode: "auto", "engine_driven" or "lmcache_driven"; None if the server does not say.
        transport: "zmq" or "grpc"; None if the server does not say.
        eviction_policy: The policy's name; None if the server does not say.
    """

    chunk_size: int
    transfer_mode: str | None = None
    transport: str | None = None
    eviction_policy: str | None = None

    @property
    def engine_driven(self) -> bool:
        """Whether the server has the operations that this client needs, as far as it says."""
        return self.transfer_mode != "lmcache_driven"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """How one model is registered by its engine, from `/status`.

    Args:
        model_name: The name in the cache's keys; vLLM's `--model`.
        world_size: Tensor-parallel ranks.
        workers: Registrations found.
        one_plane: Whether a chunk has one stored plane (MLA and fused K/V) and not two; None if not known.
        block_size: Tokens an engine block; None if not known.
        formats: The engine's block formats, one for each kernel group; empty where the engine pushes its KV.
        num_layers: Layers; None if not known.
        dtype: Type of the stored values; None if not known.
        num_kv_heads: KV heads of one rank; None if not known.
        head_dim: Values a head; None if not known.
        width: Stored values for one token of one layer on one rank, K and V together; None if not known.
    """

    model_name: str
    world_size: int = 1
    workers: int = 1
    one_plane: bool | None = None
    block_size: int | None = None
    formats: tuple[str, ...] = ()
    num_layers: int | None = None
    dtype: torch.dtype | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    width: int | None = None

    @property
    def described(self) -> str:
        """The model and its layout in words, for messages."""
        layout = ", ".join(self.formats) or ("one stored plane" if self.one_plane else "K and V apart")
        return f"KV of {self.model_name!r} ({layout}, blocks of {self.block_size or 'unknown size'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What `/status` says.

    Args:
        healthy: The server's own verdict; None if it gives none.
        model: The asked model's registration.
        model_names: Every name registered, in order, clients' scratch names and those of queries left out.
        sessions: Sessions open.
        read_locked: Chunks locked for reading.
        write_locked: Chunks reserved for writing.
        objects: Chunks held, one for each rank.
    """

    healthy: bool | None
    model: ModelLayout
    model_names: tuple[str, ...]
    sessions: int | None = None
    read_locked: int | None = None
    write_locked: int | None = None
    objects: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says about itself and about one model."""

    http_url: str
    config: ServerConfig
    state: ServerState

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk."""
        return self.config.chunk_size

    @property
    def model(self) -> ModelLayout:
        """How the model is registered."""
        return self.state.model


def parse_config(config: Any, *, url: str = "/config") -> ServerConfig:
    """Read the answer of `/config`.

    Raises:
        CacheProtocolError: It lacks the chunk size, so it is no LMCache MP server's; the message names `url`.
    """
    mp = _map(_map(config).get("mp"))
    chunk_size = mp.get("chunk_size")
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or not 1 <= chunk_size <= _MOST_CHUNK_TOKENS:
        raise CacheProtocolError(
            f"{url} does not tell the chunk size (mp.chunk_size): is it the HTTP address of an LMCache MP server "
            "(lmcache server --http-port)?"
        )
    eviction = _map(_map(_map(config).get("storage_manager")).get("eviction_config"))
    return ServerConfig(
        chunk_size=chunk_size,
        transfer_mode=_text(mp.get("supported_transfer_mode")),
        transport=_text(mp.get("transport")),
        eviction_policy=_text(eviction.get("eviction_policy")),
    )


def parse_status(status: Any, model_name: str | None = None, *, url: str = "/status") -> ServerState:
    """Read the answer of `/status`.

    Args:
        status: The decoded JSON.
        model_name: The model asked for; None: the only one that an engine has registered.
        url: Where the answer came from, for messages.

    Raises:
        CacheConnectionError: No engine has registered that model; the message names those that are.
        CacheProtocolError: It is no LMCache MP server's status.
        GeometryError: The model's layout is not supported or makes no sense.
    """
    by_server, by_engine = _map(status).get("cache_context_meta"), _map(status).get("non_cuda_context_meta")
    if not isinstance(by_server, Mapping) and not isinstance(by_engine, Mapping):
        raise CacheProtocolError(
            f"{url} does not list the registered engines: is it the HTTP address of an LMCache MP server "
            "(lmcache server --http-port)?"
        )
    entries = [entry for metas in (by_server, by_engine) for entry in map(_map, _map(metas).values())]
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        name = entry.get("model_name")
        if isinstance(name, str) and not name.startswith(SCRATCH_PREFIX) and not name.endswith(QUERY_SUFFIX):
            by_name.setdefault(name, []).append(entry)

    l1 = _map(_map(_map(status).get("storage_manager")).get("l1_manager"))
    return ServerState(
        healthy=_map(status).get("is_healthy") if isinstance(_map(status).get("is_healthy"), bool) else None,
        model=_layout(*_choose(by_name, model_name, url)),
        model_names=tuple(by_name),
        sessions=_count(_map(status).get("active_sessions")),
        read_locked=_count(l1.get("read_locked_count")),
        write_locked=_count(l1.get("write_locked_count")),
        objects=_count(l1.get("total_object_count")),
    )


def _choose(
    by_name: Mapping[str, list[Mapping[str, Any]]], model_name: str | None, url: str
) -> tuple[str, list[Mapping[str, Any]]]:
    served = ", ".join(map(repr, by_name))[:_MOST_SHOWN] or "none"
    if model_name is None:
        if len(by_name) != 1:
            raise CacheConnectionError(
                f"which model? Engines have registered at {url}: {served}"
                + ("; give model_name=" if by_name else "; start an engine with LMCache's MP connector first")
            )
        return next(iter(by_name.items()))
    if model_name not in by_name:
        raise CacheConnectionError(
            f"no engine has registered the model {model_name!r} at {url}; registered: {served}. The name is vLLM's "
            "--model (a path stays a path), not its --served-model-name"
        )
    return model_name, by_name[model_name]


def _layout(model_name: str, entries: list[Mapping[str, Any]]) -> ModelLayout:
    world_sizes = {_count(entry.get("world_size", 1)) or 0 for entry in entries}
    detailed = [layout for entry in entries if (layout := _map(entry.get("kv_cache_layout")))]
    if len(world_sizes) > 1:
        raise GeometryError(
            f"{model_name!r} is registered with {' and '.join(map(str, sorted(world_sizes)))} ranks at once: "
            "one cache server serves one tensor-parallel size of a model"
        )
    world_size = world_sizes.pop()
    if not 1 <= world_size <= _MOST_RANKS:
        raise GeometryError(f"{model_name!r} is registered with a number of ranks that cannot be")
    common = ModelLayout(model_name=model_name, world_size=world_size, workers=len(entries))
    if detailed:
        # The newest registration of a model is the one that the server goes by.
        return _with_groups(common, detailed[-1])
    newest = entries[-1]
    one_plane = newest.get("use_mla")
    return replace(
        common,
        one_plane=one_plane if isinstance(one_plane, bool) else None,
        block_size=_count(newest.get("block_size")),
    )


def _with_groups(common: ModelLayout, layout: Mapping[str, Any]) -> ModelLayout:
    raw = layout.get("kernel_groups")
    groups = [_group(_map(group)) for group in raw] if isinstance(raw, list) else []
    num_layers = _count(layout.get("num_layers"))
    if not groups:
        return replace(common, num_layers=num_layers)
    first, *others = groups
    for other in others:
        if replace(other, num_layers=first.num_layers) != first:
            raise GeometryError(
                f"the layers of {common.model_name!r} come in groups of different shape, which is not supported: "
                + "; ".join(map(str, groups))
            )
    kind = format_kind(first.format)
    if kind is None:
        raise GeometryError(f"KV of {common.model_name!r} in {first.format} is not supported")

    total = _count(layout.get("cache_size_per_token"))
    width = None
    if total is not None and num_layers and first.dtype is not None:
        width, rest = divmod(total, num_layers * first.dtype.itemsize)
        if rest:
            width = None
    heads, head_dim = first.num_kv_heads, first.head_dim
    if kind == "mla":
        heads = 1
        head_dim = head_dim or width
    elif kind == "fused" and heads and head_dim and width == heads * head_dim:
        head_dim //= 2  # some formats print the fused width of K and V as the head size
    return replace(
        common,
        one_plane=kind != "split",
        block_size=first.block_size,
        formats=tuple(group.format for group in groups),
        num_layers=num_layers,
        dtype=first.dtype,
        num_kv_heads=heads,
        head_dim=head_dim,
        width=width,
    )


@dataclass(frozen=True, slots=True)
class _Group:
    format: str
    num_layers: int | None
    block_size: int | None
    dtype: torch.dtype | None
    num_kv_heads: int | None
    head_dim: int | None

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers {self.format}, {self.num_kv_heads or '?'} heads of {self.head_dim or '?'}, "
            f"blocks of {self.block_size}, {self.dtype}"
        )


def _group(group: Mapping[str, Any]) -> _Group:
    name = _text(group.get("engine_kv_format")) or "an unnamed format"
    sizes = _concrete_sizes(name, group.get("engine_kv_concrete_shape"))
    return _Group(
        format=name,
        num_layers=_count(group.get("num_layers")),
        block_size=_count(group.get("tokens_per_block")),
        dtype=_dtype(group.get("dtype")),
        num_kv_heads=sizes.get("NH"),
        head_dim=sizes.get("HS"),
    )


def _concrete_sizes(name: str, shape: Any) -> dict[str, int]:
    """Sizes by label, from a shape such as "32 x [2, 2048, 16, 8, 128]" and the format's name, label for label."""
    labels = re.split(r"_X_|_", name)
    numbers = re.findall(r"\d+|NP", shape) if isinstance(shape, str) and not shape.startswith("Unknown") else []
    if len(numbers) != len(labels) or any(len(number) > len(str(_MOST)) for number in numbers):
        return {}
    return {label: int(number) for label, number in zip(labels, numbers, strict=True) if number.isdecimal()}


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST else None


def _dtype(value: Any) -> torch.dtype | None:
    return DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
