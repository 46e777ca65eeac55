"""What an LMCache MP server says about itself over HTTP, and the KV geometry that follows.

`/config` tells chunk size, shared memory and transfer mode; `/status` tells which engines are registered and, where the
server pulls their KV, in which block format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import torch

from lmcache_stream import bodies
from lmcache_stream.addresses import check_address, shown
from lmcache_stream.errors import CacheConnectionError, CacheProtocolError, GeometryError, UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.codec import format_kind
from lmcache_stream.kvcache.mp.pool import DTYPES

__all__ = [
    "QUERY_SUFFIX",
    "SCRATCH_PREFIX",
    "ModelLayout",
    "ServerConfig",
    "ServerFacts",
    "ServerState",
    "check_http_url",
    "check_server",
    "discover",
    "fetch_json",
    "find_model_config",
    "parse_config",
    "parse_status",
    "resolve_geometry",
]

# Names under which clients register; no engine serves them.
SCRATCH_PREFIX = "lmcache-stream:"

# Query tensors lie under the model's name with this after it.
QUERY_SUFFIX = "##query"

# A server that says more than these is none: what depends on such a number would never end.
_MOST_CHUNK_TOKENS = 1 << 20
_MOST_RANKS = 1 << 10
_MOST = 1 << 31
_EXCERPT = 200

# What a caller may tell otherwise than the model's configuration does.
_CORRECTABLE = frozenset({"rotary", "rotary_unknown", "layer_types", "num_heads"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What `/config` says.

    Args:
        chunk_size: Tokens a chunk.
        shm_name: Name of the shared-memory pool; None: transfers are pickled.
        transfer_mode: "auto", "engine_driven" or "lmcache_driven"; None if the server does not say.
        transport: "zmq" or "grpc"; None if the server does not say.
        eviction_policy: The policy's name; None if the server does not say.
    """

    chunk_size: int
    shm_name: str | None = None
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
    def shm_name(self) -> str | None:
        """Name of the shared-memory pool; None: transfers are pickled."""
        return self.config.shm_name

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
        shm_name=_text(mp.get("shm_name")),
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
    served = ", ".join(map(repr, by_name))[:_EXCERPT] or "none"
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


def resolve_geometry(
    facts: ServerFacts,
    *,
    given: KVGeometry | None = None,
    config: KVGeometry | None = None,
    given_name: str = "geometry=",
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
        said.append((given_name, {name: getattr(given, name) for name in names}))
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
            f"world_size is {layout.world_size} by {facts.http_url}/status, but {given.world_size} by {given_name}"
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


def check_server(config: ServerConfig, *, url: str, http_url: str) -> None:
    """Refuse a server that this client cannot work with at `url`.

    Raises:
        CacheConnectionError: The server lacks the operations needed, or speaks another transport; the message says how
            to start it or which URL to use.
    """
    if not config.engine_driven:
        raise CacheConnectionError(
            f"the LMCache server at {http_url} runs with --supported-transfer-mode {config.transfer_mode}, which "
            "offers this client no way to its KV: start the LMCache server with --supported-transfer-mode auto"
        )
    scheme = url.partition("://")[0]
    wanted = "grpc" if scheme.startswith("grpc") else "zmq"
    if config.transport is not None and config.transport != wanted:
        right = "grpc://host:port" if config.transport == "grpc" else "tcp://host:port"
        raise CacheConnectionError(
            f"the LMCache server at {http_url} speaks {config.transport}, but url={url!r} means {wanted}: use {right}, "
            f"or start the LMCache server with --transport {wanted}"
        )


def check_http_url(http_url: str) -> str:
    """Return `http_url` without a slash at its end.

    Raises:
        UsageError: It is no HTTP address, or holds credentials.
    """
    parts = urlsplit(check_address(http_url, "http_url"))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(
            f"http_url must start with http:// or https:// and have a host, and nothing behind the path: not "
            f"{shown(http_url)!r}"
        )
    return http_url.rstrip("/")


async def discover(http_url: str, model_name: str | None = None, *, timeout: float = 5.0) -> ServerFacts:
    """Ask a server's HTTP API about itself and about one model.

    Args:
        http_url: The HTTP address of an LMCache MP server, such as "http://localhost:8080".
        model_name: The model's name in the cache's keys; None: the only one registered.
        timeout: Seconds for both questions together.

    Raises:
        CacheConnectionError: Nobody answers there, it is not ready, or no engine has registered the model.
        CacheProtocolError: What answers is no LMCache MP server.
        GeometryError: The model's layout is not supported.
        UsageError: `http_url` is no HTTP address.
    """
    base = check_http_url(http_url)
    limit = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(timeout=limit) as session:
        url, answer = f"{base}/config", await fetch_json(session, f"{base}/config", missing_ok=True)
        if answer is None:
            url, answer = f"{base}/conf", await fetch_json(session, f"{base}/conf")
        config = parse_config(answer, url=url)
        status = await fetch_json(session, f"{base}/status")
    return ServerFacts(http_url=base, config=config, state=parse_status(status, model_name, url=f"{base}/status"))


async def fetch_json(session: aiohttp.ClientSession, url: str, *, missing_ok: bool = False) -> Any:
    """The JSON at `url`; None for a 404 where `missing_ok`.

    Raises:
        CacheConnectionError: No answer, or an error as the answer; the message has the URL.
        CacheProtocolError: The answer is no JSON, or has no end.
    """
    try:
        async with session.get(url, allow_redirects=False) as response:
            body = await bodies.read_body(response)
    except TimeoutError as error:
        raise CacheConnectionError(
            f"{url} did not answer in time: is the LMCache server up, and is this its HTTP port?"
        ) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise CacheConnectionError(
            f"cannot reach {url} ({str(error)[:_EXCERPT]}): start the LMCache server, or correct http_url"
        ) from error
    if body is None:
        raise CacheProtocolError(f"{url} answers more than {bodies.MOST_BYTES} bytes: is it an LMCache MP server's?")
    if response.status == 404 and missing_ok:
        return None
    if response.status == 503:
        raise CacheConnectionError(f"{url} answers 503{_excerpt(body)}: the LMCache server is not ready yet, try again")
    if response.status != 200:
        raise CacheProtocolError(
            f"{url} answers {response.status}{_excerpt(body)}: is it the HTTP address of an LMCache MP server "
            "(lmcache server --http-port)?"
        )
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CacheProtocolError(
            f"{url} answers no JSON{_excerpt(body)}: is it the HTTP address of an LMCache MP server "
            "(lmcache server --http-port)?"
        ) from error


def _excerpt(body: bytes) -> str:
    text = " ".join(body[:_EXCERPT].decode("utf-8", "replace").split())
    return f" ({''.join(c if c.isprintable() else '?' for c in text)})" if text else ""


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST else None


def _dtype(value: Any) -> torch.dtype | None:
    return DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
