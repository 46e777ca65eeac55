"""What the checks share: the connections, and what earlier checks found out for later ones."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.completions.faults import excerpt
from lmcache_stream.errors import UsageError
from lmcache_stream.kvcache.mp.discovery import check_http_url
from lmcache_stream.serving.doctor import limits
from lmcache_stream.serving.doctor.findings import Fails
from lmcache_stream.serving.doctor.http import decoded, get
from lmcache_stream.serving.doctor.remedies import START_CACHE, START_ENGINE
from lmcache_stream.types import Completion

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from lmcache_stream.completions.client import ModelCard
    from lmcache_stream.kvcache.mp.context import MPKVCacheContext
    from lmcache_stream.kvcache.mp.status import ServerConfig, ServerFacts
    from lmcache_stream.kvcache.mp.transport import Transport
    from lmcache_stream.kvcache.mp.wire import Registered
    from lmcache_stream.serving.doctor.options import DoctorOptions

__all__ = ["Visit"]


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
        self.http_url: str = check_http_url(options.kv_http_url)
        self.api_key: str | None = options.api_key or os.environ.get("OPENAI_API_KEY") or None
        try:
            self.client: CompletionsClient = CompletionsClient(
                options.base_url,
                model=options.model,
                api_key=self.api_key,
                connect_timeout=limits.ANSWER,
                idle_timeout=options.timeout,
                retries=0,
            )
        except UsageError as error:
            raise UsageError(str(error).replace("base_url", "--base-url")) from error
        self.requests: int = 0
        self.held: AsyncExitStack[bool | None] = AsyncExitStack()

    async def __aenter__(self) -> Self:
        limit = aiohttp.ClientTimeout(total=limits.QUICK, sock_connect=limits.ANSWER)
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
        with anyio.move_on_after(limits.CLOSING, shield=True):
            await self.held.aclose()

    def salted(self, purpose: str) -> str:
        """A fresh salt."""
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
        """Status and body at `path` of the engine."""
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
        """`/status` of the cache server."""
        status = await self.cache_json("/status")
        assert status is not None
        return status

    async def leave(self) -> None:
        """Let go of everything that is held at the cache server."""
        for name in ("context", "transport"):
            if name in vars(self):
                await vars(self)[name].close()
