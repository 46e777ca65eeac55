"""An LMCache server, and a vLLM over it, as things to start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from lmcache_stream.errors import CacheError, EngineError, UsageError
from lmcache_stream.serving.health import answers_healthy, comes_true, get_json, has_ended, not_in_time
from lmcache_stream.serving.installed import require
from lmcache_stream.serving.options import SCHEMES, CacheOptions, StackOptions, unique_name
from lmcache_stream.serving.process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

__all__ = ["CacheServer", "ServingStack"]


class CacheServer:
    """An LMCache server of one's own: healthy inside `async with`, gone without a trace after it.

    It can be killed and started again in between: ports and the segment's name stay.

    Raises:
        UsageError: `lmcache` is not installed for `options.python`.
        CacheError: It ended, or was not healthy in time; the message has the end of its log.
    """

    def __init__(self, options: CacheOptions | None = None) -> None:
        self.options: CacheOptions = options or CacheOptions()
        self.log_dir: Path = Path(self.options.log_dir or temporary_folder())
        port, http_port, prometheus_port = free_ports(self.options.host, 3)
        self.port: int = self.options.port or port
        self.http_port: int = self.options.http_port or http_port
        self.process: ServerProcess = ServerProcess(
            "the LMCache server",
            self.options.command(self.port, self.http_port, prometheus_port),
            log=self.log_dir / "lmcache.log",
            env=self.options.environment(os.environ),
            segments=self.options.segments,
            grace=self.options.grace,
        )

    @property
    def kv_url(self) -> str:
        """Where requests go: `tcp://HOST:PORT` or `grpc://HOST:PORT`."""
        return f"{SCHEMES[self.options.transport]}://{self.options.host}:{self.port}"

    @property
    def kv_http_url(self) -> str:
        """Where `/status` and `/config` are."""
        return f"http://{self.options.host}:{self.http_port}"

    async def start(self) -> None:
        """Start it and wait until it is healthy; after `kill` or `stop` on the same ports."""
        await require(self.options.python, "lmcache")
        try:
            await self.process.start()
            await self.healthy(timeout=self.options.start_timeout)
        except BaseException:
            await self.stop()
            raise

    async def healthy(self, *, timeout: float) -> None:
        """Return when `/status` says that it is healthy.

        Raises:
            CacheError: It has ended, or was not healthy in time.
        """
        if not await comes_true(lambda: answers_healthy(f"{self.kv_http_url}/status"), self.check, timeout):
            raise CacheError(await not_in_time(self.process, timeout))

    async def check(self) -> None:
        """Raise `CacheError` if the server has ended."""
        if self.process.returncode is not None:
            raise CacheError(await has_ended(self.process))

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after its grace."""
        await self.process.stop()

    async def kill(self) -> None:
        """Kill it hard; `start` starts it again in the same place."""
        await self.process.kill()

    async def status(self) -> dict[str, Any]:
        """`/status`."""
        return await get_json(f"{self.kv_http_url}/status")

    async def config(self) -> dict[str, Any]:
        """`/config`."""
        return await get_json(f"{self.kv_http_url}/config")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class ServingStack:
    """An LMCache server and a vLLM over it: both healthy inside `async with`, both gone without a trace after it.

    Raises:
        UsageError: `vllm` or `lmcache` is not installed for `options.python`.
        CacheError, EngineError: A server ended, or was not healthy in time; the message has the end of its log.
    """

    def __init__(self, options: StackOptions) -> None:
        self.options: StackOptions = options
        self.cache: CacheServer = CacheServer(options.cache)
        self.log_dir: Path = self.cache.log_dir
        taken = {self.cache.port, self.cache.http_port}
        self.port: int = options.port or next(port for port in free_ports(options.host, 3) if port not in taken)
        self.process: ServerProcess = ServerProcess(
            "vLLM",
            options.command(self.port, self.cache.port),
            log=self.log_dir / "vllm.log",
            env=options.environment(os.environ),
            grace=options.grace,
        )

    @property
    def kv_url(self) -> str:
        """Where the cache takes requests."""
        return self.cache.kv_url

    @property
    def kv_http_url(self) -> str:
        """Where the cache has `/status` and `/config`."""
        return self.cache.kv_http_url

    @property
    def base_url(self) -> str:
        """vLLM's address, without `/v1`."""
        return f"http://{self.options.host}:{self.port}"

    @property
    def model_name(self) -> str:
        """The name that the cache keeps KV under."""
        return self.options.model_name

    @property
    def served_model_name(self) -> str:
        """The name in requests to vLLM."""
        return self.options.served_name

    def engine_line(self) -> str:
        """The call that makes a client of this stack's vLLM."""
        return f"CompletionsClient({self.base_url!r}, model={self.served_model_name!r})"

    def connect_line(self) -> str:
        """The call that connects to this stack's cache and proves the reading of its KV with `engine`."""
        return f"connect({self.kv_url!r}, {self.kv_http_url!r}, model_name={self.model_name!r}, probe=engine)"

    def doctor_line(self) -> str:
        """The command that checks this stack."""
        return (
            f"lmcache-stream doctor --base-url {self.base_url} --kv-url {self.kv_url} --kv-http-url {self.kv_http_url}"
        )

    def describe(self) -> str:
        """What runs where, for a terminal."""
        return "\n".join(
            (
                f"vLLM       {self.base_url}  (model {self.served_model_name!r})",
                f"LMCache    {self.kv_url}  {self.kv_http_url}",
                f"logs       {self.log_dir}",
                "",
                f"engine = {self.engine_line()}",
                f"cache  = {self.connect_line()}",
                "",
                self.doctor_line(),
            )
        )

    def addresses(self) -> dict[str, str]:
        """What `describe` says, ready for JSON."""
        return {
            "base_url": self.base_url,
            "kv_url": self.kv_url,
            "kv_http_url": self.kv_http_url,
            "model": self.served_model_name,
            "kv_model": self.model_name,
            "log_dir": str(self.log_dir),
        }

    async def status(self) -> dict[str, Any]:
        """The cache's `/status`."""
        return await self.cache.status()

    async def registrations(self) -> list[dict[str, Any]]:
        """What `/status` says of each rank of vLLM."""
        return registrations(await self.status(), self.model_name)

    async def start(self) -> None:
        """Start both and wait until both are healthy and every rank of vLLM is registered at the cache."""
        await require(self.options.python, "lmcache", "vllm", device=self.options.device)
        started = time.monotonic()
        limit = self.options.start_timeout
        try:
            await self.cache.process.start()
            await self.process.start()
            await self.cache.healthy(timeout=limit)
            if not await comes_true(self.is_ready, self.check, limit - (time.monotonic() - started)):
                raise EngineError(await not_in_time(self.process, limit))
        except BaseException:
            await self.stop()
            raise

    async def is_ready(self) -> bool:
        """Whether vLLM is healthy and every rank of it is registered at the cache."""
        if not await answers_healthy(f"{self.base_url}/health"):
            return False
        with contextlib.suppress(CacheError):
            return len(await self.registrations()) >= self.options.tensor_parallel_size
        return False

    async def check(self) -> None:
        """Raise `CacheError` or `EngineError` if one of the servers has ended."""
        await self.cache.check()
        if self.process.returncode is not None:
            raise EngineError(await has_ended(self.process))

    async def watch(self) -> None:
        """Wait until a server ends, and raise."""
        ends = [asyncio.ensure_future(process.wait()) for process in (self.cache.process, self.process)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        await self.check()

    async def stop(self) -> None:
        """Stop vLLM, then the cache; bounded by the grace of each."""
        with anyio.CancelScope(shield=True):
            try:
                await self.process.stop()
            finally:
                await self.cache.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def registrations(status: Mapping[str, Any], model_name: str) -> list[dict[str, Any]]:
    """The workers of `model_name` in a `/status`, whichever way they move KV."""
    workers: list[dict[str, Any]] = []
    for table in ("cache_context_meta", "non_cuda_context_meta"):
        workers += [worker for worker in status.get(table, {}).values() if worker.get("model_name") == model_name]
    return workers


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            try:
                each.bind((host, 0))
            except OSError as error:
                raise UsageError(
                    f"cannot listen on {host} ({error.strerror}): --host takes an address of this machine"
                ) from error
        return [each.getsockname()[1] for each in sockets]


def temporary_folder() -> Path:
    return Path(tempfile.gettempdir(), unique_name())
