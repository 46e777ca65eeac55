"""The checks of the cache server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio

from lmcache_stream.errors import CacheConnectionError, CacheError
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.kvcache.mp.resolve import find_model_config
from lmcache_stream.kvcache.mp.status import SCRATCH_PREFIX, ServerFacts, parse_config, parse_status
from lmcache_stream.kvcache.mp.transport import open_transport
from lmcache_stream.kvcache.mp.wire import GET_CHUNK_SIZE, REGISTER, UNREGISTER, Registration
from lmcache_stream.serving.doctor import limits
from lmcache_stream.serving.doctor.checks import Check, Examine, declare
from lmcache_stream.serving.doctor.findings import Blocked, Fails, Result, passes, warns
from lmcache_stream.serving.doctor.http import get, version_in
from lmcache_stream.serving.doctor.remedies import CONNECTOR, START_CACHE
from lmcache_stream.serving.doctor.status import part
from lmcache_stream.serving.doctor.visit import Visit

__all__ = ["CHECKS"]

CHECKS: list[Check] = []
check: partial[Callable[[Examine], Examine]] = partial(declare, CHECKS)


@check("cache http", remedy=START_CACHE)
async def cache_answers_http(visit: Visit) -> Result:
    config = await visit.cache_json("/config", missing_ok=True)
    if config is None:
        config = await visit.cache_json("/conf")
    visit.config = parse_config(config, url=f"{visit.http_url}/config")
    visit.status = await visit.cache_status()
    if visit.status.get("is_healthy") is False:
        raise Fails(f"{visit.http_url}/status: not healthy", "look into the LMCache server's log, and restart it")
    return passes(f"{visit.http_url} is healthy")


@check("cache version", needs=["cache http"], remedy=START_CACHE)
async def cache_version(visit: Visit) -> Result:
    return passes(version_in(*await get(visit.cache_http, f"{visit.http_url}/version", START_CACHE)))


@check("transport", needs=["cache http"], remedy=START_CACHE)
async def transport_is_right(visit: Visit) -> Result:
    spoken = visit.config.transport
    meant = "grpc" if visit.options.kv_url.startswith("grpc") else "zmq"
    if spoken not in (None, meant):
        url = "grpc://HOST:PORT" if spoken == "grpc" else "tcp://HOST:PORT"
        raise Fails(
            f"the LMCache server speaks {spoken}, but --kv-url {visit.options.kv_url} means {meant}",
            f"use --kv-url {url}, or start the LMCache server with --transport {meant}",
        )
    return passes(spoken or f"not told, {meant} taken")


@check("transfer mode", needs=["cache http"], remedy=START_CACHE)
async def transfer_mode_serves_us(visit: Visit) -> Result:
    mode = visit.config.transfer_mode
    if not visit.config.engine_driven:
        raise Fails(
            f"--supported-transfer-mode {mode} offers this client no way to the KV",
            "start the LMCache server with --supported-transfer-mode auto",
        )
    return passes(mode or "not told")


@check(
    "cache rpc",
    needs=["transport"],
    remedy="start the LMCache server, or correct --kv-url (its --port, 5555 by default)",
)
async def cache_answers_requests(visit: Visit) -> Result:
    visit.transport = open_transport(visit.options.kv_url, lanes=1)
    visit.held.push_async_callback(visit.transport.close)
    visit.rpc_chunk_size = await visit.transport.call(GET_CHUNK_SIZE, timeout=limits.ANSWER)
    return passes(f"{visit.options.kv_url} answers")


@check(
    "same server",
    needs=["cache http", "cache rpc", "transfer mode"],
    remedy="start the LMCache server with --supported-transfer-mode auto",
)
async def urls_are_of_one_server(visit: Visit) -> Result:
    remedy = "give --kv-url and --kv-http-url of one LMCache server (its --port and --http-port)"
    if visit.rpc_chunk_size != visit.config.chunk_size:
        raise Fails(
            f"chunks have {visit.rpc_chunk_size} tokens by --kv-url, but {visit.config.chunk_size} by --kv-http-url",
            remedy,
        )
    # A registration made here must show there.
    instance_id = secrets.randbits(63)
    scratch = Registration(
        instance_id=instance_id,
        model_name=f"{SCRATCH_PREFIX}{uuid.uuid4().hex}",
        world_size=1,
        block_size=visit.config.chunk_size,
        num_layers=1,
        hidden_dim_size=1,
        dtype_str="uint8",
        use_mla=True,
    )
    try:
        visit.registered = await visit.transport.call(REGISTER, scratch, timeout=limits.ANSWER)
        shown = part(await visit.cache_status(), "non_cuda_context_meta")
    finally:
        with anyio.CancelScope(shield=True), contextlib.suppress(CacheError):
            await visit.transport.call(UNREGISTER, instance_id, timeout=1.0)
    if str(instance_id) not in shown:
        raise Fails("a client registered at --kv-url does not show at --kv-http-url", remedy)
    return passes("a client registered at --kv-url shows at --kv-http-url")


@check("shared memory", needs=["same server"], remedy=START_CACHE)
async def memory_is_shared(visit: Visit) -> Result:
    name = visit.registered.shm_name.lstrip("/")
    if not name:
        return warns(
            "KV travels as pickles, which is slower",
            "start the LMCache server with --shm-name NAME --no-l1-use-lazy, on this machine",
        )
    size = await asyncio.to_thread(segment_size, name)
    if size is None:
        raise Fails(
            f"the server's segment /dev/shm/{name} cannot be opened here",
            "run on the cache server's machine with /dev/shm shared (containers: --ipc=host), or start it without "
            "--shm-name",
        )
    return passes(f"/dev/shm/{name}, {size / 2**30:.3g} GiB")


def segment_size(name: str) -> int | None:
    path = Path("/dev/shm", name)
    try:
        return path.stat().st_size if os.access(path, os.R_OK | os.W_OK) else None
    except (OSError, ValueError):
        return None


@check("eviction", needs=["cache http"], remedy=START_CACHE)
async def eviction_spares_salts(visit: Visit) -> Result:
    policy = visit.config.eviction_policy
    if policy == "IsolatedLRU":
        return warns(
            "IsolatedLRU wipes chunks under a cache_salt that has no quota, so edits vanish",
            "start the LMCache server with --eviction-policy LRU, or set a quota for the salts",
        )
    return passes(policy or "not told")


@check(
    "registration",
    needs=["cache http"],
    remedy="restart vLLM and the LMCache server, one tensor-parallel size of a model to a cache server",
)
async def model_is_registered(visit: Visit) -> Result:
    loaded = None if visit.card is None else visit.card.root or visit.card.id
    name = visit.options.kv_model or loaded
    try:
        state = parse_status(visit.status, name, url=f"{visit.http_url}/status")
    except CacheConnectionError as error:
        if name is None:
            raise Blocked("model") from None
        raise Fails(str(error), f"give --kv-model a name registered; if the model is not: {CONNECTOR}") from None
    layout = state.model
    if layout.workers < layout.world_size:
        raise Fails(
            f"{layout.workers} of {layout.world_size} ranks of {layout.model_name!r} are registered",
            "restart vLLM: each of its ranks registers when it starts",
        )
    visit.facts = ServerFacts(http_url=visit.http_url, config=visit.config, state=state)
    ranks = f", {layout.world_size} ranks" if layout.world_size > 1 else ""
    return passes(f"{layout.described}{ranks}")


@check("chunk size", needs=["registration"], remedy=START_CACHE)
async def chunks_are_whole_blocks(visit: Visit) -> Result:
    chunk, block = visit.facts.chunk_size, visit.facts.model.block_size
    if block and chunk % block:
        raise Fails(
            f"chunks of {chunk} tokens are no multiple of the engine's blocks of {block}",
            f"start the LMCache server with --chunk-size {block * -(-chunk // block)}, or vLLM with a --block-size "
            f"that divides {chunk}",
        )
    return passes(f"chunks of {chunk} tokens, blocks of {block or 'unknown size'}")


@check(
    "geometry",
    needs=["same server", "shared memory", "registration", "chunk size"],
    remedy="connect with geometry=KVGeometry.from_config('config.json') of the model that vLLM runs",
)
async def geometry_is_known(visit: Visit) -> Result:
    model = visit.facts.model
    visit.context = await visit.held.enter_async_context(
        await open_context(
            visit.options.kv_url,
            http_url=visit.http_url,
            model_name=model.model_name,
            timeout=visit.options.timeout,
        )
    )
    geometry = visit.context.geometry
    if geometry is None:
        return warns(
            f"neither /status nor a config.json at {model.model_name!r} tells layers, heads and head size",
            "connect with probe=engine, or with geometry=KVGeometry.from_config('config.json')",
        )
    path = await asyncio.to_thread(find_model_config, model.model_name)
    sources = [
        name for name, told in (("/status", model.num_layers is not None), (str(path), path is not None)) if told
    ]
    shape = f"{geometry.num_layers} layers, {geometry.num_kv_heads} KV heads of {geometry.head_dim}"
    detail = f"{shape}; from {' and '.join(sources)}"
    if geometry.rotary is None:
        return warns(
            f"{detail}; positions unknown: {geometry.rotary_unknown or 'nobody tells them'}",
            "editors that change positions refuse this: connect with geometry=KVGeometry.from_config('config.json')",
        )
    return passes(detail)
