"""Copies of KV, and other work on it, off the event loop."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from lmcache_stream import observe
from lmcache_stream.errors import UsageError
from lmcache_stream.finishing import finish

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["TransferExecutor", "default_executor"]

T = TypeVar("T")

_STAGING_BYTES = 16 << 20


class TransferExecutor:
    """Copies of KV, and other work on it, off the event loop, on `lanes` workers. Editors run in threads of their own.

    On a CPU a lane is a thread. On a GPU it is a thread with a CUDA stream and pinned staging buffers of its own: work
    starts after what the submitting thread had queued on its current stream, and counts as done when the GPU has done
    it, which the lane waits for.

    It may be used from any thread and any event loop.

    Args:
        lanes: Workers.
        device: What lanes copy to and from; None for the current CUDA device if there is one, else the CPU.

    Raises:
        UsageError: `lanes` is below 1, or `device` is neither a CPU nor a CUDA device.
    """

    def __init__(self, lanes: int = 2, *, device: torch.device | str | None = None) -> None:
        if lanes < 1:
            raise UsageError(f"a TransferExecutor needs at least 1 lane, not {lanes}")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.lanes = lanes
        self.device: torch.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise UsageError(f"a TransferExecutor runs on a CPU or a CUDA device, not on {self.device}")
        if str(self.device) == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._lane = threading.local()
        self._pool = ThreadPoolExecutor(
            max_workers=lanes,
            thread_name_prefix="lmcache-stream-transfer",
            initializer=self._open_lane if self.device.type == "cuda" else None,
        )
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it takes no more work."""
        return self._closed

    async def run(self, fn: Callable[..., T], /, *args: Any) -> T:
        """Run `fn(*args)` on a lane.

        Cancelled before the work began, the work is dropped. Cancelled while it runs, the work is waited for, since
        its buffers are in use, and then the cancellation goes on.

        Raises:
            UsageError: The executor is closed.
        """
        work = _Work(fn, args)
        del args
        with observe.transfer(fn):
            future = self._submit(work)
            result = asyncio.wrap_future(future)
            try:
                return await asyncio.shield(result)
            except asyncio.CancelledError:
                if future.cancel():
                    work.drop()
                else:
                    work.result_wanted = False
                    await finish(result, None)
                    if not result.cancelled():
                        result.exception()  # nobody wants it any more
                raise
            finally:
                del future, result

    def submit(self, fn: Callable[..., T], /, *args: Any) -> Future[T]:
        """Run `fn(*args)` on a lane, from synchronous code.

        Raises:
            UsageError: The executor is closed.
        """
        return self._submit(_Work(fn, args))

    async def copy_(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy `src` into `dst`: equal shapes, any devices, dtypes and strides."""
        await self.run(self._copy, dst, src)

    async def to_device(self, t: torch.Tensor) -> torch.Tensor:
        """Copy to the executor's device; always a copy, contiguous."""
        return await self.run(self._copy_to, t, self.device)

    async def to_host(self, t: torch.Tensor) -> torch.Tensor:
        """Copy to the CPU; always a copy, contiguous."""
        return await self.run(self._copy_to, t, torch.device("cpu"))

    def close(self) -> None:
        """Take no more work; what was given is still done. A second close does nothing."""
        self._closed = True
        self._pool.shutdown(wait=False)

    def _submit(self, work: _Work[T]) -> Future[T]:
        call = work if self.device.type == "cpu" else self._on_stream(work)
        try:
            return self._pool.submit(call)
        except RuntimeError as error:
            raise UsageError(f"the TransferExecutor is closed: {error}") from error

    def _open_lane(self) -> None:
        torch.cuda.set_device(self.device)
        self._lane.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._lane.staging = _Staging()

    def _on_stream(self, work: _Work[T]) -> Callable[[], T]:
        caller = torch.cuda.current_stream(self.device)
        inputs_ready = caller.record_event()

        def call() -> T:
            stream = self._lane.stream
            stream.wait_event(inputs_ready)
            with torch.cuda.stream(stream):
                try:
                    result = work()
                finally:
                    stream.record_event().synchronize()
            _used_by(caller, result)
            return result

        return call

    def _copy_to(self, t: torch.Tensor, device: torch.device) -> torch.Tensor:
        dst = torch.empty(t.shape, dtype=t.dtype, device=device)
        self._copy(dst, t)
        return dst

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        staging: _Staging | None = getattr(self._lane, "staging", None)
        if staging is None or dst.is_cuda == src.is_cuda:
            dst.copy_(src)
        else:
            staging.copy_(dst, src)


class _Work(Generic[T]):
    """One call. Its arguments, and a result that nobody waits for, are let go in the worker: freeing gigabytes takes
    many milliseconds."""

    def __init__(self, fn: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._fn = fn
        self._args = args
        self.result_wanted = True

    def __call__(self) -> T:
        args, self._args = self._args, ()
        try:
            result = self._fn(*args)
        except StopIteration as error:
            raise RuntimeError("StopIteration was raised, which no future can carry") from error
        del args
        if not self.result_wanted:
            del result
            raise asyncio.CancelledError
        return result

    def drop(self) -> None:
        self._args = ()


class _Staging:
    """Pinned buffers that a lane copies through between the CPU and its GPU: one is filled while the other travels."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._arrived = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]

    def copy_(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy between the CPU and the GPU, on the current stream."""
        if dst.is_pinned() or src.is_pinned():
            dst.copy_(src, non_blocking=True)
            return
        whole = dst if dst.is_contiguous() else torch.empty(dst.shape, dtype=dst.dtype, device=dst.device)
        to = _pieces(whole)
        of = _pieces(src.to(dst.dtype).contiguous())
        if src.is_cuda:
            self._to_host(to, of)
        else:
            self._to_device(to, of)
        if whole is not dst:
            dst.copy_(whole)

    def _to_device(self, to: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
        for i, (target, source) in enumerate(zip(to, of, strict=True)):
            arrived, buffer = self._arrived[i % 2], self._buffers[i % 2][: source.numel()]
            arrived.synchronize()
            buffer.copy_(source)
            target.copy_(buffer, non_blocking=True)
            arrived.record()

    def _to_host(self, to: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> None:
        for i in range(len(of) + 1):
            if i < len(of):
                self._buffers[i % 2][: of[i].numel()].copy_(of[i], non_blocking=True)
                self._arrived[i % 2].record()
            if i > 0:
                self._arrived[(i - 1) % 2].synchronize()
                to[i - 1].copy_(self._buffers[(i - 1) % 2][: to[i - 1].numel()])


def _pieces(t: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of a contiguous tensor, as much at a time as a staging buffer holds."""
    flat = t.view(-1).view(torch.uint8)
    return [flat[start : start + _STAGING_BYTES] for start in range(0, flat.numel(), _STAGING_BYTES)]


def _used_by(stream: torch.cuda.Stream, result: object) -> None:
    """Keep the memory of a lane's results from being reused while work on `stream` still reads it."""
    if isinstance(result, torch.Tensor):
        if result.is_cuda:
            result.record_stream(stream)
    elif isinstance(result, tuple | list):
        for item in result:
            _used_by(stream, item)


_lock = threading.Lock()
_default: TransferExecutor | None = None


def default_executor() -> TransferExecutor:
    """The process's own executor: made at first use, closed at exit, usable from any event loop and thread."""
    global _default
    with _lock:
        if _default is None or _default.closed:
            _default = TransferExecutor()
        return _default


def _close_default() -> None:
    if _default is not None:
        _default.close()


def _forget_after_fork() -> None:
    global _lock, _default
    _lock = threading.Lock()
    _default = None


atexit.register(_close_default)
os.register_at_fork(after_in_child=_forget_after_fork)
