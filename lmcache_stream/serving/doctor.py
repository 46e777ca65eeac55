"""`lmcache-stream doctor`: examines an engine and its cache server with real requests, and says what to change.

Each check is a small function of its own. One whose prerequisite failed is skipped, so that one cause makes one
failure. Requests go under scratch salts; the few chunks that they leave in the cache are evicted like any others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import secrets
import time
import uuid
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import aiohttp
import anyio
import msgspec
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmcache_stream.addresses import check_address
from lmcache_stream.completions import CompletionsClient
from lmcache_stream.completions.faults import excerpt
from lmcache_stream.console import add_json_flag
from lmcache_stream.errors import CacheConnectionError, CacheError, EngineResponseError, LMCacheError, UsageError
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.kvcache.mp.discovery import check_http_url
from lmcache_stream.kvcache.mp.resolve import find_model_config
from lmcache_stream.kvcache.mp.status import SCRATCH_PREFIX, ServerConfig, ServerFacts, parse_config, parse_status
from lmcache_stream.kvcache.mp.transport import Transport, open_transport, schemes
from lmcache_stream.kvcache.mp.wire import GET_CHUNK_SIZE, REGISTER, UNREGISTER, Registered, Registration
from lmcache_stream.types import Completion

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from lmcache_stream.completions.client import ModelCard

__all__ = ["DoctorOptions", "Finding", "add_arguments", "diagnose", "run"]

Status: TypeAlias = Literal["pass", "fail", "warn", "skip"]

ANSWER = 3.0
"""Seconds that a server has to answer one small question."""

QUICK = 4.5
"""Seconds that a check takes at most that sends no prompt of many tokens."""

ARRIVAL = 30.0
"""Seconds that the KV of a few chunks may take to come into the cache."""

CLOSING = 10.0
CHUNKS = 3
TAIL = 5
SHORT_PROMPT = (11, 29, 53, 83, 127, 191)
COLOURS: Mapping[Status, str] = {"pass": "green", "fail": "bold red", "warn": "yellow", "skip": "dim"}

START_ENGINE = "start vLLM, or correct --base-url"
START_CACHE = "start the LMCache server, or correct --kv-http-url (its --http-port)"
CONNECTOR = (
    "start vLLM with --kv-transfer-config for LMCacheMPConnector, kv_role kv_both, and lmcache.mp.host and "
    "lmcache.mp.port of this cache server"
)
TELL_CACHED = "start vLLM with --enable-prompt-tokens-details: nothing else tells that an edit was decoded from"
HONOUR_SALTS = "serve with a vLLM and an LMCache connector that honour cache_salt: edits rest on it"


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is examined.

    Args:
        base_url: Address of the engine.
        kv_url: The cache server's request endpoint.
        kv_http_url: The same server's HTTP address.
        model: Name in requests to the engine; None: the only one that it serves.
        kv_model: Name in the cache; None: what the engine says that it loaded.
        api_key: The engine's; None: that of `OPENAI_API_KEY`, if it is set.
        timeout: Seconds that one check takes at most.
        probe: Whether the reading of the KV is to be proven, which takes a prompt of some 2,000 tokens.

    Raises:
        UsageError: A URL or the time-out cannot be right.
    """

    base_url: str
    kv_url: str
    kv_http_url: str
    model: str | None = None
    kv_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 120.0
    probe: bool = True

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise UsageError(f"timeout must be a number of seconds above 0, not {self.timeout:g}")
        if self.kv_url.partition("://")[0] not in schemes:
            known = ", ".join(f"{name}://" for name in schemes)
            raise UsageError(f"--kv-url {self.kv_url} is no cache server's: begin it with one of {known}")
        if not self.kv_http_url.startswith(("http://", "https://")):
            raise UsageError(f"--kv-http-url {self.kv_http_url} must begin with http:// or https://")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Args:
        name: The check.
        status: "pass"; "fail"; "warn": it works, but not as well as it could; "skip": not examined.
        detail: What was seen.
        remedy: What to change; empty where nothing is to be.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A finding without its name; `go_on` tells whether checks that need this one make sense."""

    status: Status
    detail: str
    remedy: str = ""
    go_on: bool = True


class Fails(Exception):
    """Ends a check."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.result: Result = Result("fail", detail, remedy, go_on=False)


class Blocked(Exception):
    """Ends a check that cannot be made without what another one would have found."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        name: Its name, unique.
        examine: Does it.
        needs: Names of earlier checks without which it makes no sense.
        remedy: What to change where an error comes that `examine` does not explain itself.
        patient: Whether it may take the time-out of the options.
    """

    name: str
    examine: Callable[[Visit], Awaitable[Result]]
    needs: tuple[str, ...]
    remedy: str
    patient: bool


CHECKS: list[Check] = []


def check(
    name: str, *, needs: Sequence[str] = (), remedy: str, patient: bool = False
) -> Callable[[Callable[[Visit], Awaitable[Result]]], Callable[[Visit], Awaitable[Result]]]:
    def add(examine: Callable[[Visit], Awaitable[Result]]) -> Callable[[Visit], Awaitable[Result]]:
        CHECKS.append(Check(name, examine, tuple(needs), remedy, patient))
        return examine

    return add


def passes(detail: str) -> Result:
    return Result("pass", detail)


def warns(detail: str, remedy: str) -> Result:
    return Result("warn", detail, remedy)


class Visit:
    """What the checks share: the connections, and what earlier checks found out for later ones."""

    completion: Completion
    config: ServerConfig
    status: Mapping[str, Any]
    transport: Transport
    rpc_chunk_size: int
    registered: Registered
    facts: ServerFacts
    context: MPKVCacheContext
    prompt: list[int]
    salt: str
    card: ModelCard | None = None

    def __init__(self, options: DoctorOptions) -> None:
        self.options = options
        check_address(options.kv_url, "kv_url")
        self.http_url: str = check_http_url(options.kv_http_url)
        self.api_key: str | None = options.api_key or os.environ.get("OPENAI_API_KEY") or None
        try:
            self.client: CompletionsClient = CompletionsClient(
                options.base_url,
                model=options.model,
                api_key=self.api_key,
                connect_timeout=ANSWER,
                idle_timeout=options.timeout,
                retries=0,
            )
        except UsageError as error:
            raise UsageError(str(error).replace("base_url", "--base-url")) from error
        self.requests: int = 0
        self.held: AsyncExitStack[bool | None] = AsyncExitStack()

    async def __aenter__(self) -> Self:
        limit = aiohttp.ClientTimeout(total=QUICK, sock_connect=ANSWER)
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        self.cache_http: aiohttp.ClientSession = aiohttp.ClientSession(timeout=limit)
        self.engine_http: aiohttp.ClientSession = aiohttp.ClientSession(timeout=limit, headers=key)
        for session in (self.cache_http, self.engine_http):
            self.held.push_async_callback(session.close)
        self.held.push_async_callback(self.client.aclose)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        with anyio.move_on_after(CLOSING, shield=True):
            await self.held.aclose()

    def salted(self, purpose: str) -> str:
        return f"doctor-{purpose}-{uuid.uuid4().hex}"

    def without_key(self, text: str) -> str:
        """`text` without the API key, should a server have repeated it."""
        if not self.api_key:
            return text
        key = re.escape(self.api_key)
        return re.sub(key if len(self.api_key) >= 8 else rf"(?<!\w){key}(?!\w)", "***", text)

    async def complete(self, prompt: Sequence[int], salt: str = "") -> tuple[list[int], Completion]:
        """The ids of a completion of one token, and how it ended."""
        self.requests += 1
        ids: list[int] = []
        completion = Completion()
        async with aclosing(self.client(list(prompt), {"max_tokens": 1, "temperature": 0}, salt)) as events:
            async for event in events:
                if isinstance(event, Completion):
                    completion = event
                elif event.token_id is not None:
                    ids.append(event.token_id)
        return ids, completion

    async def cached_tokens(self, salt: str) -> int | None:
        """How many tokens of the prompt the engine takes from a cache under `salt`; None if it does not say."""
        _, completion = await self.complete(self.prompt, salt)
        return completion.usage.cached_tokens if completion.usage is not None else None

    async def engine_get(self, path: str) -> tuple[int, bytes]:
        return await get(self.engine_http, self.client.base_url + path, START_ENGINE)

    async def cache_json(self, path: str, *, missing_ok: bool = False) -> Mapping[str, Any] | None:
        """The JSON object at `path` of the cache server; None where there is no such route, if that is fine."""
        url = self.http_url + path
        status, body = await get(self.cache_http, url, START_CACHE)
        if status == 404 and missing_ok:
            return None
        if status == 503:
            raise Fails(f"{url} answers 503: {excerpt(body, 120)}", "wait until the LMCache server is ready")
        wrong = "is --kv-http-url an LMCache MP server's HTTP address (lmcache server --http-port)?"
        if status != 200:
            raise Fails(f"{url} answers {status}: {excerpt(body, 120)}", wrong)
        answer = decoded(body)
        if not isinstance(answer, dict):
            raise Fails(f"{url} answers no JSON object, but: {excerpt(body, 120)}", wrong)
        return answer

    async def cache_status(self) -> Mapping[str, Any]:
        status = await self.cache_json("/status")
        assert status is not None
        return status

    async def leave(self) -> None:
        """Let go of everything that is held at the cache server."""
        for name in ("context", "transport"):
            if name in vars(self):
                await vars(self)[name].close()


async def get(session: aiohttp.ClientSession, url: str, remedy: str) -> tuple[int, bytes]:
    try:
        async with session.get(url, allow_redirects=False) as response:
            return response.status, await response.read()
    except TimeoutError:
        raise Fails(f"{url} gives no answer in time", remedy) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Fails(f"{url} gives no answer: {error}", remedy) from None


def decoded(body: bytes) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


# The engine.


@check("engine", remedy=START_ENGINE)
async def engine_is_healthy(visit: Visit) -> Result:
    status, body = await visit.engine_get("/health")
    if status == 503:
        raise Fails(f"/health answers 503: {excerpt(body, 120)}", "wait until vLLM is ready, or look into its log")
    if status != 200:
        raise Fails(f"/health answers {status}: {excerpt(body, 120)}", "is --base-url the address of vLLM?")
    return passes(f"{visit.client.base_url} is healthy")


@check("engine version", needs=["engine"], remedy=START_ENGINE)
async def engine_version(visit: Visit) -> Result:
    return passes(version_in(*await visit.engine_get("/version")))


def version_in(status: int, body: bytes) -> str:
    answer = decoded(body) if status == 200 else None
    if isinstance(answer, dict):
        answer = answer.get("version") or answer.get("lmcache_version")
    return answer if isinstance(answer, str) and answer else "not published"


@check("model", needs=["engine"], remedy="is --base-url the address of vLLM?")
async def model_is_served(visit: Visit) -> Result:
    try:
        cards = await visit.client.models(timeout=ANSWER)
    except EngineResponseError as error:
        if error.status in (401, 403):
            raise Fails(str(error), "give the engine's key with --api-key, or in OPENAI_API_KEY") from None
        raise
    names = ", ".join(repr(card.id) for card in cards) or "none"
    wanted = visit.options.model
    found = [card for card in cards if wanted in (None, card.id)]
    if not found:
        named = f"not {wanted!r}; " if wanted else ""
        raise Fails(f"{named}served: {names}", "give --model one of the names served")
    if len(found) > 1:
        raise Fails(f"several models are served: {names}", "choose one with --model")
    visit.card = found[0]
    root = f", loaded from {visit.card.root}" if visit.card.root not in (None, visit.card.id) else ""
    return passes(f"{visit.card.id}{root}")


@check(
    "token ids",
    needs=["model"],
    remedy="serve with vLLM 0.10.2 or newer, and with no proxy in between that drops return_token_ids or token_ids",
    patient=True,
)
async def token_ids_come_back(visit: Visit) -> Result:
    try:
        ids, visit.completion = await visit.complete(SHORT_PROMPT)
    except EngineResponseError as error:
        raise Fails(f"the engine refuses a completion: {error}", "look into the engine's log") from None
    usage = visit.completion.usage
    if usage is None:
        return warns(f"{ids} came, but no usage", "serve with an engine that knows stream_options.include_usage")
    if len(ids) != usage.completion_tokens or len(ids) != 1:
        raise Fails(
            f"{len(ids)} ids came for one token asked for and {usage.completion_tokens} counted",
            "serve with an engine that honours max_tokens and return_token_ids, such as vLLM 0.10.2 or newer",
        )
    return passes("as many ids as usage counts")


@check("cached tokens", needs=["token ids"], remedy=TELL_CACHED)
async def usage_tells_cached_tokens(visit: Visit) -> Result:
    usage = visit.completion.usage
    if usage is None or usage.cached_tokens is None:
        return warns("usage does not tell cached_tokens", TELL_CACHED)
    return passes("usage tells cached_tokens")


@check("cache salt", needs=["token ids"], remedy=HONOUR_SALTS, patient=True)
async def cache_salt_is_accepted(visit: Visit) -> Result:
    await visit.complete(SHORT_PROMPT, visit.salted("accepted"))
    return passes("a request with cache_salt is accepted")


@check("prefix caching", needs=["engine"], remedy=START_ENGINE)
async def prefix_caching(visit: Visit) -> Result:
    status, body = await visit.engine_get("/metrics")
    info = re.search(rb'vllm:cache_config_info\{[^}]*enable_prefix_caching="(\w+)"', body) if status == 200 else None
    told = {b"True": "on", b"False": "off"}.get(info[1]) if info else None
    return passes(f"{told or 'not told'}; either will do, since every edit has a cache_salt of its own")


# The cache server.


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
    visit.rpc_chunk_size = await visit.transport.call(GET_CHUNK_SIZE, timeout=ANSWER)
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
        visit.registered = await visit.transport.call(REGISTER, scratch, timeout=ANSWER)
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


# Both together.


@check(
    "offload",
    needs=["token ids", "cache salt", "geometry"],
    remedy=CONNECTOR,
    patient=True,
)
async def kv_comes_into_the_cache(visit: Visit) -> Result:
    chunk = visit.context.chunk_size
    longest = (visit.card and visit.card.max_model_len) or CHUNKS * chunk + TAIL + 1
    chunks = min(CHUNKS, (longest - TAIL - 1) // chunk)
    if chunks < 1:
        raise Fails(
            f"the engine's longest sequence of {longest} tokens holds no chunk of {chunk}",
            "start the LMCache server with a smaller --chunk-size",
        )
    visit.salt = visit.salted("prompt")
    visit.prompt = random.Random(0).choices(range(10, 200), k=chunks * chunk + TAIL)
    started = time.monotonic()
    cached = await visit.cached_tokens(visit.salt)
    if cached:
        raise Fails(f"{cached} tokens are taken from a cache under a fresh salt", HONOUR_SALTS)
    answered = time.monotonic()
    covered = await visit.context.wait_for(
        visit.prompt, timeout=min(ARRIVAL, visit.options.timeout / 2), cache_salt=visit.salt, poll_interval=0.05
    )
    if covered < chunks * chunk:
        raise Fails(
            f"the cache has {covered} of {chunks * chunk} tokens {time.monotonic() - answered:.0f} s after the answer",
            f"{CONNECTOR}; raise --l1-size-gb if it is full. {HONOUR_SALTS}",
        )
    seconds = time.monotonic() - answered
    return passes(f"{covered} tokens, {seconds:.2f} s after an answer that took {answered - started:.2f} s")


@check("salts apart", needs=["offload"], remedy=HONOUR_SALTS, patient=True)
async def salts_keep_apart(visit: Visit) -> Result:
    other = visit.salted("other")
    found = await visit.context.lookup(visit.prompt, other)
    if found:
        raise Fails(f"the cache finds {found} tokens of one salt under another", HONOUR_SALTS)
    cached = await visit.cached_tokens(other)
    if cached:
        raise Fails(f"the engine takes {cached} tokens of one salt for another", HONOUR_SALTS)
    return passes("KV of one salt is not found under another")


@check(
    "reading",
    needs=["offload"],
    remedy="connect with geometry=KVGeometry.from_config('config.json') of the model that vLLM runs; a block format "
    "that is not known cannot be edited",
    patient=True,
)
async def reading_is_proven(visit: Visit) -> Result:
    if not visit.options.probe:
        return Result("skip", "--no-probe: how the KV is to be read is believed, not proven")
    visit.requests += 1
    result = await visit.context.probe(visit.client, timeout=visit.options.timeout / 2)
    unproven = f"; not proven: {'; '.join(result.unproven)}" if result.unproven else ""
    return passes(f"proven over {result.span} positions: {'; '.join(result.proven)}{unproven}")


@check(
    "round trip",
    needs=["offload", "reading"],
    remedy="run doctor without --no-probe, and look into the LMCache server's log",
    patient=True,
)
async def kv_goes_round(visit: Visit) -> Result:
    context, prompt = visit.context, visit.prompt
    kv = await context.retrieve(prompt, visit.salt)
    whole = len(prompt) // context.chunk_size * context.chunk_size
    if kv is None or kv.shape[2] < whole:
        got = 0 if kv is None else kv.shape[2]
        raise Fails(f"the cache gives {got} of {whole} tokens back", "raise the LMCache server's --l1-size-gb")
    salt = visit.salted("edit")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about IsolatedLRU, which is a finding of its own
        outcome = await context.put(kv, prompt[:whole], salt)
    if not outcome.complete:
        raise Fails(
            f"the cache took {outcome.taken} of {outcome.chunks} chunks under a fresh salt",
            "raise the LMCache server's --l1-size-gb",
        )
    back = await context.retrieve(prompt, salt)
    if back is None or not await context.executor.run(equal_bytes, kv, back):
        raise Fails("what was stored came back changed", "look into the LMCache server's log")
    cached = await visit.cached_tokens(salt)
    if cached is None:
        return warns("stored and read back; nothing tells whether the engine decoded from it", TELL_CACHED)
    if cached < whole:
        raise Fails(f"the engine took {cached} of {whole} stored tokens from the cache", f"{CONNECTOR}. {HONOUR_SALTS}")
    megabytes = kv.numel() * kv.element_size() / 1e6
    return passes(f"{whole} tokens ({megabytes:.1f} MB) read, stored under another salt, and decoded from")


def equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@check("clean up", needs=["cache http"], remedy=START_CACHE)
async def nothing_is_left(visit: Visit) -> Result:
    await visit.leave()
    before, clients_before = held(visit.status), scratch_clients(visit.status)
    deadline = time.monotonic() + ANSWER
    while True:
        status = await visit.cache_status()
        left = {name: count for name, count in held(status).items() if count > before.get(name, 0)}
        if clients := scratch_clients(status) - clients_before:
            left["clients registered"] = len(clients)
        if not left:
            return passes("no lock, session or registration is left")
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    # Where the server pulls the KV, it opens the session of a finished request again to do so (LMCache 0.5.6).
    if part(status, "cache_context_meta") and left.keys() == {"sessions"} and left["sessions"] <= visit.requests:
        return passes(f"no lock or registration is left; {left['sessions']} sessions are the engine's")
    words = ", ".join(f"{count} {name}" for name, count in left.items())
    if any(before.values()):
        return warns(f"{words}, on a server that was at work before", "run doctor again when the server is idle")
    raise Fails(words, "if other clients are at work, run doctor when they are not; the server lets go in some minutes")


def held(status: Mapping[str, Any]) -> dict[str, int]:
    l1 = part(status, "storage_manager", "l1_manager")
    counts = {
        "sessions": status.get("active_sessions"),
        "lookups": status.get("active_prefetch_jobs"),
        "chunks locked for reading": l1.get("read_locked_count"),
        "chunks locked for writing": l1.get("write_locked_count"),
    }
    return {name: count for name, count in counts.items() if isinstance(count, int)}


def scratch_clients(status: Mapping[str, Any]) -> set[str]:
    clients = part(status, "non_cuda_context_meta")
    return {one for one in clients if str(part(clients, one).get("model_name", "")).startswith(SCRATCH_PREFIX)}


def part(value: Any, *keys: str) -> Mapping[str, Any]:
    """The map at a path of keys; empty where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


# All of them.


async def diagnose(options: DoctorOptions, *, on_check: Callable[[str], None] | None = None) -> list[Finding]:
    """Make every check, in order.

    Args:
        options: What to examine.
        on_check: Called with the name of each check before it is made.

    Returns:
        One finding a check. No error of a server is raised.

    Raises:
        UsageError: An address cannot be right, or holds credentials.
    """
    findings: list[Finding] = []
    usable: set[str] = set()
    async with Visit(options) as visit:
        for each in CHECKS:
            if on_check is not None:
                on_check(each.name)
            missing = [name for name in each.needs if name not in usable]
            result = blocked_by(*missing) if missing else await examine(each, visit)
            if result.go_on:
                usable.add(each.name)
            detail, remedy = (printable(visit.without_key(text)) for text in (result.detail, result.remedy))
            findings.append(Finding(each.name, result.status, detail, remedy))
    return findings


async def examine(each: Check, visit: Visit) -> Result:
    limit = visit.options.timeout if each.patient else min(QUICK, visit.options.timeout)
    try:
        async with asyncio.timeout(limit):
            return await each.examine(visit)
    except Fails as end:
        return end.result
    except Blocked as end:
        return blocked_by(*end.args)
    except TimeoutError as error:
        remedy = "raise --timeout, or look into the logs of both servers" if each.patient else each.remedy
        return Result("fail", str(error) or f"did not end within {limit:g} s", remedy, go_on=False)
    except (LMCacheError, OSError, aiohttp.ClientError) as error:
        broken = isinstance(error, EngineResponseError) and error.status >= 500
        remedy = "look into the engine's log" if broken else each.remedy
        return Result("fail", str(error) or type(error).__name__, remedy, go_on=False)


def blocked_by(*names: str) -> Result:
    return Result("skip", f"needs: {', '.join(names)}", go_on=False)


def printable(text: str) -> str:
    # Servers' words end up here: they must not steer the terminal.
    return "".join(char if char.isprintable() else " " for char in text)


def has_failed(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "fail" for finding in findings)


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `lmcache-stream doctor`."""
    parser.description = (
        "Send real requests to a vLLM and its LMCache server, and say for everything that has to fit whether it does "
        "and what to change. The addresses may stand in LMCACHE_STREAM_BASE_URL, LMCACHE_STREAM_KV_URL and "
        "LMCACHE_STREAM_KV_HTTP_URL."
    )

    def add(flag: str, *variables: str, required: bool = False, **given: Any) -> None:
        default = next((os.environ[name] for name in variables if os.environ.get(name)), None)
        parser.add_argument(flag, default=default, required=required and default is None, **given)

    add(
        "--base-url",
        *("LMCACHE_STREAM_BASE_URL", "OPENAI_BASE_URL"),
        required=True,
        metavar="URL",
        help="of the engine, such as http://localhost:8000",
    )
    add(
        "--kv-url",
        *("LMCACHE_STREAM_KV_URL", "LMCACHE_STREAM_URL"),
        required=True,
        metavar="URL",
        help="where the cache server takes requests, such as tcp://localhost:5555",
    )
    add(
        "--kv-http-url",
        *("LMCACHE_STREAM_KV_HTTP_URL", "LMCACHE_STREAM_HTTP_URL"),
        required=True,
        metavar="URL",
        help="the same server's HTTP address, such as http://localhost:8080",
    )
    add(
        "--model",
        "LMCACHE_STREAM_SERVED_MODEL",
        metavar="NAME",
        help="in requests to the engine (default: the one that it serves)",
    )
    add(
        "--kv-model",
        "LMCACHE_STREAM_KV_MODEL",
        metavar="NAME",
        help="in the cache (default: what the engine says that it loaded, vLLM's --model)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="of the engine (default: $OPENAI_API_KEY)")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="that one check takes at most (%(default)g)"
    )
    add_json_flag(parser)
    parser.add_argument(
        "--no-probe",
        dest="probe",
        action="store_false",
        help="do not prove how the KV is to be read, which takes a prompt of some 2,000 tokens",
    )


def run(args: argparse.Namespace) -> int:
    """Examine, and print what was found.

    Returns:
        0 when nothing failed, else 1.

    Raises:
        UsageError: The options cannot be right.
    """
    options = DoctorOptions(
        base_url=args.base_url,
        kv_url=args.kv_url,
        kv_http_url=args.kv_http_url,
        model=args.model,
        kv_model=args.kv_model,
        api_key=args.api_key,
        timeout=args.timeout,
        probe=args.probe,
    )
    with progress() as on_check:
        findings = asyncio.run(diagnose(options, on_check=on_check))
    if args.json is not None:
        args.json.write(document(options, findings))
    else:
        show(findings, Console(force_jupyter=False, highlight=False))
    return int(has_failed(findings))


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None] | None]:
    """Tells a terminal on standard error which check is under way."""
    console = Console(stderr=True, force_jupyter=False, highlight=False)
    if not console.is_terminal:
        yield None
        return
    with console.status("") as status:
        yield lambda name: status.update(f"checking: {name}")


def document(options: DoctorOptions, findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as one JSON object."""
    return {
        "ok": not has_failed(findings),
        "base_url": options.base_url,
        "kv_url": options.kv_url,
        "kv_http_url": options.kv_http_url,
        "findings": [asdict(finding) for finding in findings],
    }


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print a table of the findings, with the remedies in it, and how many there are of each kind."""
    table = Table(box=box.ROUNDED)
    table.add_column("Check", no_wrap=True)
    table.add_column("Result", no_wrap=True)
    table.add_column("What was seen, and what to change", overflow="fold")
    for finding in findings:
        words = Text(finding.detail)
        if finding.remedy:
            words.append("\nTo change: ", style="bold").append(finding.remedy)
        table.add_row(Text(finding.name), Text(finding.status, style=COLOURS[finding.status]), words)
    console.print(table)
    counts = ((status, sum(finding.status == status for finding in findings)) for status in COLOURS)
    console.print(Text(", ".join(f"{count} {status}" for status, count in counts if count)))
