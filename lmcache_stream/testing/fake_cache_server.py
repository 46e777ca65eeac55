"""A cache server for tests: the LMCache MP server's manners without LMCache, and faults to order.

It has a real ZMQ ROUTER, a real POSIX shared-memory segment and a real HTTP API. As with the real server, a request
that fails is not answered.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import msgspec

from lmcache_stream.kvcache.mp import wire
from lmcache_stream.testing.cache_faults import Fault, FaultKind, check_kind, replies, spoiled
from lmcache_stream.testing.cache_requests import CacheRequests, Refused
from lmcache_stream.testing.cache_sockets import Router, serve_http

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["FakeCacheServer", "Fault", "FaultKind"]

_BY_ID = {operation.id: operation for operation in wire.OPERATIONS}


class FakeCacheServer(CacheRequests):
    """A cache server on 127.0.0.1, in threads of its own. Use it as a context manager, or call `start` and `stop`.

    Args:
        chunk_size: Tokens a chunk.
        pool_bytes: Bytes of the pool. It never evicts; what does not fit gets no slot.
        shared_memory: Whether chunks go through shared memory; else as pickles.
        transfer_mode: What `/config` says. In "lmcache_driven" the operations that move data are not answered.
        eviction_policy: What `/config` says.
        conf_route: Answer `/conf` and not `/config`.

    Attributes:
        calls: How often each operation was called.
        http_status: What HTTP answers with; a test may change it.
        http_answers: What a path answers in place of its own: JSON, or bytes as they are.
    """

    def __init__(
        self,
        *,
        chunk_size: int = 32,
        pool_bytes: int = 8 << 20,
        shared_memory: bool = True,
        transfer_mode: str = "auto",
        eviction_policy: str = "LRU",
        conf_route: bool = False,
    ) -> None:
        super().__init__(
            chunk_size=chunk_size, pool_bytes=pool_bytes, shared_memory=shared_memory, transfer_mode=transfer_mode
        )
        self.eviction_policy = eviction_policy
        self.http_status: int = 200
        self.http_answers: dict[str, Any] = {}
        self.calls: Counter[str] = Counter()
        self._conf_route = conf_route
        self._faults: dict[str, deque[Fault]] = {}
        self._restarting: list[threading.Thread] = []
        self._port = 0
        self._router: Router | None = None
        self._http: ThreadingHTTPServer | None = None

    # Life.

    def start(self) -> Self:
        """Start to serve."""
        self._make_segment()
        self._router = Router(self._handle, self._port)
        self._port = self._router.port
        self._http = serve_http(self)
        return self

    def stop(self) -> None:
        """Stop, and unlink the segment. A second stop does nothing."""
        for restarting in self._restarting:
            restarting.join()
        self.kill()
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None
        self._drop_segment()

    def kill(self) -> None:
        """Stop to answer requests, as a server that died; HTTP answers 503 from then on."""
        if self._router is not None:
            self._router.close()
            self._router = None
        self.http_status = 503

    def restart(self, *, engines_return: bool = True) -> None:
        """Come back on the same port with nothing in memory and a new segment of the same name.

        Args:
            engines_return: Whether the engines register again.
        """
        self.kill()
        with self._lock:
            self._drop_segment()
            self._make_segment()
            if not engines_return:
                self._engines.clear()
            self._reset()
        self._router = Router(self._handle, self._port)
        self.http_status = 200

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The request endpoint."""
        return f"tcp://127.0.0.1:{self._port}"

    @property
    def http_url(self) -> str:
        """The HTTP address."""
        assert self._http is not None
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    # What a test orders.

    def fault(
        self,
        operation: wire.Operation[Any],
        kind: FaultKind,
        *,
        times: int = 1,
        after: int = 0,
        seconds: float | None = None,
    ) -> Fault:
        """Order a fault for requests of `operation`; several for one operation come in turn.

        Args:
            operation: One of `lmcache_stream.kvcache.mp.wire`, such as `LOOKUP`.
            kind: See `FaultKind`.
            times: How many requests it befalls.
            after: How many requests come through before.
            seconds: After which a held reply is sent by itself; None: at `release`.

        Raises:
            UsageError: Nothing of the kind can befall `operation`.
        """
        check_kind(kind, operation, shared_memory=bool(self.shm_name))
        fault = Fault(kind, times, after, seconds)
        with self._lock:
            self._faults.setdefault(operation.name, deque()).append(fault)
        return fault

    # What a test looks at.

    def config(self) -> dict[str, Any]:
        """What `/config` answers."""
        return {
            "mp": {
                "transport": "zmq",
                "chunk_size": self.chunk_size,
                "shm_name": self.shm_name,
                "supported_transfer_mode": self.transfer_mode,
            },
            "storage_manager": {"eviction_config": {"eviction_policy": self.eviction_policy}},
        }

    def status(self) -> dict[str, Any]:
        """What `/status` answers."""
        with self._lock:
            l1 = {
                "total_object_count": len(self._chunks) + len(self._reserved),
                "read_locked_count": sum(chunk.read_locks > 0 for chunk in self._chunks.values()),
                "write_locked_count": len(self._reserved),
            }
            return {
                "is_healthy": True,
                "chunk_size": self.chunk_size,
                "active_sessions": len(self._sessions),
                "active_prefetch_jobs": len(self._jobs),
                "storage_manager": {"l1_manager": l1},
                "cache_context_meta": {},
                "non_cuda_context_meta": {
                    str(instance_id): {
                        "model_name": registration.model_name,
                        "world_size": registration.world_size,
                        "block_size": registration.block_size,
                        "use_mla": registration.use_mla,
                    }
                    for instance_id, registration in self._registrations.items()
                },
            }

    def http_answer(self, path: str) -> Any:
        """What `path` answers; None: there is no such route."""
        if path in self.http_answers:
            return self.http_answers[path]
        if path == ("/conf" if self._conf_route else "/config"):
            return self.config()
        return self.status() if path == "/status" else None

    # Requests.

    def _handle(self, frames: list[bytes], reply: Callable[[list[bytes]], None]) -> None:
        _, operation_id, *args = frames
        operation = _BY_ID[msgspec.msgpack.decode(operation_id)]
        with self._lock:
            self.calls[operation.name] += 1
            fault = self._next_fault(operation)
            if fault is None:
                self._work(operation, frames, reply)
                return
            if fault.kind in ("restart", "die"):
                self._go_down(fault)
                return
            if fault.kind == "evict":
                self.lose_chunks_of(args)
            elif fault.kind == "forget":
                self.forget()
            if fault.kind != "ignore":
                with self._full_for(fault.kind == "no-room"):
                    self._work(operation, frames, reply, fault)
        fault.struck.set()

    @contextmanager
    def _full_for(self, now: bool) -> Iterator[None]:
        before: bool = self.full
        self.full: bool = before or now
        try:
            yield
        finally:
            self.full = before

    def _work(
        self,
        operation: wire.Operation[Any],
        frames: list[bytes],
        reply: Callable[[list[bytes]], None],
        fault: Fault | None = None,
    ) -> None:
        uid, operation_id, *args = frames
        try:
            result = self.answer(operation, args)
        except Refused:
            return
        if fault is not None:
            result = spoiled(result, fault.kind, self.pool_bytes)
        answer = [uid, operation_id] if result is None else [uid, operation_id, msgspec.msgpack.encode(result)]
        if fault is None:
            reply(answer)
        elif fault.kind == "hold":
            fault.hold(lambda: reply(answer))
        else:
            for sent in replies(answer, fault.kind):
                reply(sent)

    def _next_fault(self, operation: wire.Operation[Any]) -> Fault | None:
        faults = self._faults.get(operation.name)
        if not faults:
            return None
        fault = faults[0]
        if fault.after > 0:
            fault.after -= 1
            return None
        fault.times -= 1
        if fault.times <= 0:
            faults.popleft()
        return fault

    def _go_down(self, fault: Fault) -> None:
        """Restart, or die, in a thread of its own: this is the one that has to end."""

        def go_down() -> None:
            if fault.kind == "restart":
                self.restart()
            else:
                self.kill()
            fault.struck.set()

        thread = threading.Thread(target=go_down, name="fake cache server going down")
        self._restarting.append(thread)
        thread.start()
