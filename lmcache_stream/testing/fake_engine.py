"""A fake engine on a real socket: exact bytes, pace and faults to order."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from lmcache_stream.errors import UsageError
from lmcache_stream.testing.engine_connection import Connection, RecordedRequest
from lmcache_stream.testing.entered import Entered, listen
from lmcache_stream.testing.replies import End, Reply, blocks, error_reply, event_stream, json_reply, writes

__all__ = ["End", "EngineCache", "FakeEngine", "RecordedRequest", "Reply"]

COMPLETIONS = "/v1/completions"
_BOS = 256


class EngineCache(Protocol):
    """Where an engine finds and leaves the KV of prompts; a `FakeCacheServer` is one."""

    def covered(self, model_name: str, token_ids: Sequence[int], cache_salt: str = "") -> int:
        """Tokens of the longest prefix that it holds."""
        ...

    def offload(self, model_name: str, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """Keep the KV of the whole chunks of a prompt."""
        ...


class FakeEngine(Entered):
    """An engine that answers what it was told to.

    It serves `/v1/completions` (streamed), `/v1/models`, `/health`, `/tokenize` and `/detokenize` in vLLM's shapes, on
    127.0.0.1 and a free port. Use it with `async with`; a plain `with` runs it on the background loop of the
    synchronous classes. A reply is what `script` queued, then `default`.

    Args:
        model: Name of the model.
        default: The reply when nothing is queued for `/v1/completions`.
        root: Path of the model, as `/v1/models` tells it.
        max_model_len: As `/v1/models` tells it.
        port: Port to listen on; 0 for a free one.
        cache: Where it offloads the KV of its prompts, as it answers; usage then tells what it found there before.

    Attributes:
        offloads: Whether it offloads; a test may change it.
        requests: Every request that arrived, oldest first.
        accepted: Connections accepted so far.
        disconnects: Responses that the client left before their end.
    """

    def __init__(
        self,
        *,
        model: str = "fake",
        default: Reply | None = None,
        root: str | None = None,
        max_model_len: int = 4096,
        port: int = 0,
        cache: EngineCache | None = None,
    ) -> None:
        self.model = model
        self.default: Reply = default or Reply()
        self.root: str = root or model
        self.max_model_len = max_model_len
        self.requests: list[RecordedRequest] = []
        self.accepted = 0
        self.disconnects = 0
        self.offloads = True
        self._kv_cache = cache
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port = port
        self._script: dict[str, deque[Reply]] = {}
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    @property
    def base_url(self) -> str:
        """Address, without `/v1`."""
        if self._port == 0:
            raise UsageError("this FakeEngine does not run: enter it first")
        return f"http://127.0.0.1:{self._port}"

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._connections)

    @property
    def completions(self) -> list[RecordedRequest]:
        """The requests for completions, oldest first."""
        return [request for request in self.requests if request.path == COMPLETIONS]

    def script(self, *replies: Reply, path: str = COMPLETIONS) -> None:
        """Queues replies for the next requests of `path`, one each.

        Outside `/v1/completions`, a reply without a body is the ordinary answer with that reply's pace and faults.
        """
        self._script.setdefault(path, deque()).extend(replies)

    async def start(self) -> None:
        """Begins to listen."""
        loop = self._loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(self, loop), "127.0.0.1", self._port, backlog=4096, start_serving=False
        )
        self._port = await listen(server)
        self._server = server

    async def stop(self) -> None:
        """Stops listening and drops every connection."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.abort()
            await self._server.wait_closed()
            self._server = None
            await self.until(lambda: not self._connections)

    async def until(self, condition: Callable[[], bool], *, timeout: float = 5.0) -> None:
        """Waits until `condition()` holds; it is looked at whenever a request, a connection or its end comes.

        It may be awaited on any event loop.

        Raises:
            TimeoutError: It did not come to hold in `timeout` seconds.
        """
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            waiting = self.until(condition, timeout=timeout)
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(waiting, self._loop))
            return
        if condition():
            return
        met: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (condition, met)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout):
                await met
        finally:
            self._waiting.remove(entry)

    async def disconnected(self, count: int = 1, *, timeout: float = 5.0) -> None:
        """Waits until clients have left `count` responses before their end."""
        await self.until(lambda: self.disconnects >= count, timeout=timeout)

    def _changed(self) -> None:
        for condition, met in self._waiting:
            if not met.done() and condition():
                met.set_result(None)

    def _reply_to(self, request: RecordedRequest) -> tuple[Reply, Iterable[bytes]]:
        """The reply and its body in writes."""
        path = urlsplit(request.path).path
        queue = self._script.get(path)
        reply = queue.popleft() if queue else None
        if path != COMPLETIONS and (reply is None or (reply.body is None and reply.status == 200)):
            served = self._served(path, request)
            reply = served if reply is None else replace(reply, body=served.body, content_type=served.content_type)
        reply = reply or self.default
        if reply.body is not None or reply.status != 200:
            return reply, writes(blocks(reply.body or b""), reply)
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal, [refusal.body or b""]
        reply = self._with_cache(reply, request)
        events = event_stream(reply, request.json, self.model)
        if reply.comments:
            events = [b": keep-alive\n\n" + event for event in events]
        return reply, writes(events, reply)

    def _with_cache(self, reply: Reply, request: RecordedRequest) -> Reply:
        """The reply with what the cache held of the prompt, which the cache holds from now on."""
        if self._kv_cache is None:
            return reply
        ids, salt = request.json["prompt"], request.json.get("cache_salt", "")
        covered = self._kv_cache.covered(self.model, ids, salt)
        if self.offloads:
            self._kv_cache.offload(self.model, ids, salt)
        if reply.cached_tokens is not None:
            return reply
        return replace(reply, cached_tokens=min(covered, len(ids) - 1))

    def _served(self, path: str, request: RecordedRequest) -> Reply:
        if path == "/health":
            return Reply(body=b"", content_type="")
        if path == "/v1/models":
            card = {
                "id": self.model,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": self.root,
                "parent": None,
                "max_model_len": self.max_model_len,
                "permission": [],
            }
            return json_reply({"object": "list", "data": [card]})
        if path == "/tokenize":
            asked = request.json
            ids = [_BOS] * asked.get("add_special_tokens", True) + list(asked["prompt"].encode())
            return json_reply(
                {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": None}
            )
        if path == "/detokenize":
            known = bytes(token for token in request.json["tokens"] if token < _BOS)
            return json_reply({"prompt": known.decode("utf-8", "replace")})
        return json_reply({"detail": "Not Found"}, status=404)

    def _refusal(self, request: RecordedRequest) -> Reply | None:
        """The errors of vLLM that a client can run into by itself."""
        try:
            asked = request.json
        except msgspec.DecodeError as exc:
            return error_reply(400, f"Invalid JSON: {exc}", "BadRequestError")
        if not isinstance(asked, dict) or not asked.get("prompt"):
            return error_reply(400, "prompt is missing", "BadRequestError", "prompt")
        if asked.get("model", self.model) != self.model:
            return error_reply(404, f"The model `{asked['model']}` does not exist.", "NotFoundError", "model")
        if asked.get("cache_salt") == "":
            message = "Parameter 'cache_salt' must be a non-empty string if provided."
            return error_reply(400, message, "BadRequestError", "cache_salt")
        if not asked.get("stream"):
            return error_reply(400, "FakeEngine only streams: ask with stream=true", "BadRequestError", "stream")
        return None
