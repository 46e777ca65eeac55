"""Connects to an LMCache MP server: what it is, what the KV of the model is, and that both URLs mean one server."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from lmcache_stream.addresses import check_address, shown
from lmcache_stream.errors import CacheConnectionError, UsageError
from lmcache_stream.finishing import finish
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.context import check_timeout
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.kvcache.mp.discovery import check_http_url, check_server, discover, fetch_config
from lmcache_stream.kvcache.mp.lifetime import CLOSE_TIMEOUT
from lmcache_stream.kvcache.mp.resolve import find_model_config, resolve_geometry
from lmcache_stream.kvcache.mp.status import ModelLayout, ServerFacts, ServerState
from lmcache_stream.kvcache.mp.transport import load_transport, open_transport
from lmcache_stream.kvcache.mp.wire import GET_CHUNK_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmcache_stream.transfer import TransferExecutor
    from lmcache_stream.types import AsyncPostCompletion, PostCompletion

__all__ = ["open_context"]

CONNECT_TIMEOUT = 3.0
"""Seconds for each of the few questions that connecting asks."""

logger: logging.Logger = logging.getLogger(__name__)


async def open_context(
    url: str,
    *,
    http_url: str | None = None,
    model_name: str | None = None,
    timeout: float = 60.0,
    geometry: KVGeometry | None = None,
    probe: PostCompletion | AsyncPostCompletion | None = None,
    executor: TransferExecutor | None = None,
    lanes: int = 2,
    serve: bool = False,
    populate: bool = False,
) -> MPKVCacheContext:
    """Connect to an LMCache MP server.

    Args:
        url: Its request endpoint, `tcp://host:port`, `ipc://path`, `grpc://host:port` or `grpc+unix://path`.
        http_url: Its HTTP address, such as `http://localhost:8080`.
        model_name: The model's name in the cache, which is vLLM's `--model`; None: the only one registered.
        timeout: Seconds that connecting, a probe left out, and later each call takes at most unless it says otherwise.
        geometry: Shape of the KV, where the server does not tell, or to be checked against what it tells.
        probe: An engine to prove the reading of the KV with.
        executor: Where copies run; None: the process's own.
        lanes: Connections that move data side by side.
        serve: Register the model's name too, for a cache that no engine uses. Needs `model_name` and `geometry`.
        populate: Map the server's whole shared memory ahead, in the background: first stores are faster, but its memory
            is taken at once, and counts as this process's.

    Raises:
        UsageError: The arguments cannot be right.
        CacheConnectionError: The server cannot be reached or used; the message says what to change.
        GeometryError: What is known of the KV is contradictory.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + check_timeout(timeout)

    def left() -> float:
        return max(0.001, min(CONNECT_TIMEOUT, deadline - loop.time()))

    check_address(url, "url")
    if "?" in url or "#" in url:
        raise UsageError(
            f"{shown(url)} is followed by parameters, which a cache server's address has not: leave them out"
        )
    if http_url is None:
        raise UsageError(f"{url} needs the same server's HTTP address: http_url='http://host:8080' (its --http-port)")
    check_http_url(http_url)
    if serve and (model_name is None or geometry is None):
        raise UsageError("serve=True needs model_name and geometry: nobody else tells them")
    await load_transport(url)
    transport = open_transport(url, lanes=lanes)
    context: MPKVCacheContext | None = None
    try:
        facts = await _discover(url, http_url, model_name, geometry if serve else None, left)
        chunk_size = await transport.call(GET_CHUNK_SIZE, timeout=left())
        if chunk_size != facts.chunk_size:
            raise CacheConnectionError(
                f"{url} has chunks of {chunk_size} tokens, but {http_url} says {facts.chunk_size}: url and http_url "
                "are two different servers"
            )
        shape = await _geometry(facts, geometry)
        context = MPKVCacheContext(
            transport,
            facts,
            timeout=timeout,
            geometry=shape,
            explicit=geometry is not None,
            executor=executor,
            populate=populate,
        )
        await context.start(serve=serve, timeout=left())
        if probe is not None:
            await context.probe(probe)
        shape = context.geometry
        logger.info("connected to %s: %s, chunks of %d tokens, %s", url, facts.model.described, chunk_size, shape)
    except BaseException:
        closing = context.close() if context is not None else transport.close()
        await finish(asyncio.ensure_future(closing), CLOSE_TIMEOUT)
        raise
    return context


async def _discover(
    url: str, http_url: str, model_name: str | None, served: KVGeometry | None, left: Callable[[], float]
) -> ServerFacts:
    if served is None:
        return await discover(http_url, model_name, url=url, timeout=left())
    assert model_name is not None
    base = check_http_url(http_url)
    config = await fetch_config(base, timeout=left())
    check_server(config, url=url, http_url=base)
    model = ModelLayout(
        model_name=model_name,
        world_size=served.world_size,
        one_plane=served.planes == 1,
        block_size=served.block_size,
    )
    state = ServerState(healthy=None, model=model, model_names=(model_name,))
    return ServerFacts(http_url=base, config=config, state=state)


async def _geometry(facts: ServerFacts, given: KVGeometry | None) -> KVGeometry | None:
    def resolve() -> KVGeometry | None:
        path = find_model_config(facts.model.model_name)
        config = KVGeometry.from_config(path) if path is not None else None
        return resolve_geometry(facts, given=given, config=config, config_name=str(path or "config.json"))

    return await asyncio.to_thread(resolve)
