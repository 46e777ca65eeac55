"""A batch for code without `await`: its synchronous face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_stream import portal
from lmcache_stream.batch.asynchronous import AsyncBatchedStream, OnError
from lmcache_stream.batch.members import Members
from lmcache_stream.editors.base import Editor
from lmcache_stream.metrics import Metrics, StreamPerfMetrics
from lmcache_stream.progress import ProgressOption
from lmcache_stream.stream import LMCacheStream, ModifyReceipt
from lmcache_stream.stream.edits import ModifyFn

if TYPE_CHECKING:
    import os

__all__ = ["LMCacheBatchedStream"]


class LMCacheBatchedStream(Members[LMCacheStream]):
    """The synchronous face of `AsyncBatchedStream`: the same arguments, methods and errors, without `await`.

    A plain blocking `post_completion` runs in threads, one a stream.

    Args:
        max_concurrency: As for `AsyncBatchedStream`.
        on_error: As for `AsyncBatchedStream`.
        progress: As for `AsyncBatchedStream`; it is called on the background event loop.
        journal: As for `AsyncBatchedStream`.
    """

    _stream_type = LMCacheStream

    def __init__(
        self,
        *,
        max_concurrency: int | None = None,
        on_error: OnError = "raise",
        progress: ProgressOption = None,
        journal: str | os.PathLike[str] | None = None,
    ) -> None:
        self._streams: dict[str, LMCacheStream] = {}
        self._async_batch = AsyncBatchedStream(
            max_concurrency=max_concurrency, on_error=on_error, progress=progress, journal=journal
        )

    def add(self, stream: LMCacheStream) -> None:
        """Make `stream` part of the batch, keyed by `stream.stream_id()`; errors as `AsyncBatchedStream.add`."""
        super().add(stream)
        self._async_batch.add(stream.async_stream)

    @property
    def perf_metrics(self) -> dict[str, StreamPerfMetrics]:
        """Metrics of each stream's last request, by stream id; of the last phase that sent any."""
        return self._async_batch.perf_metrics

    @property
    def receipts(self) -> dict[str, ModifyReceipt]:
        """Receipt of each stream's last edit, by stream id; of the last phase that edited."""
        return self._async_batch.receipts

    @property
    def failures(self) -> dict[str, BaseException]:
        """Exception of each stream that failed in the last phase, by stream id."""
        return self._async_batch.failures

    @property
    def restored(self) -> frozenset[str]:
        """Ids of the streams whose part in the last phase was taken from the journal."""
        return self._async_batch.restored

    def prefill(
        self,
        sampling_params: Mapping[str, Any],
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Sequence[str] | None = None,
        *,
        max_concurrency: int | None = None,
        timeout: float | None = None,
    ) -> Metrics:
        """Run every stream with `max_tokens` 1; see `AsyncBatchedStream.prefill`."""
        return portal.run(
            self._async_batch.prefill,
            sampling_params,
            fmt,
            width,
            stream_ids,
            max_concurrency=max_concurrency,
            timeout=timeout,
        )

    def modify(
        self,
        fn: ModifyFn | Editor,
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Sequence[str] | None = None,
        *,
        max_concurrency: int | None = None,
        timeout: float = 30,
        poll_interval: float = 0.2,
    ) -> Metrics:
        """Edit every stream's KV; see `AsyncBatchedStream.modify`."""
        return portal.run(
            self._async_batch.modify,
            fn,
            fmt,
            width,
            stream_ids,
            max_concurrency=max_concurrency,
            timeout=timeout,
            poll_interval=poll_interval,
        )

    def decode(
        self,
        sampling_params: Mapping[str, Any],
        fmt: str = "terminal",
        width: int = 80,
        stream_ids: Sequence[str] | None = None,
        *,
        edit_every: int | None = None,
        editor: ModifyFn | Editor | None = None,
        max_concurrency: int | None = None,
        timeout: float | None = None,
    ) -> Metrics:
        """Run every stream with `sampling_params`; see `AsyncBatchedStream.decode`."""
        return portal.run(
            self._async_batch.decode,
            sampling_params,
            fmt,
            width,
            stream_ids,
            edit_every=edit_every,
            editor=editor,
            max_concurrency=max_concurrency,
            timeout=timeout,
        )

    def run_streams(
        self,
        sampling_params: Mapping[str, Any],
        stream_ids: Sequence[str] | None = None,
        *,
        max_concurrency: int | None = None,
        timeout: float | None = None,
    ) -> float:
        """`generate(sampling_params)` on every stream, in seconds; see `AsyncBatchedStream.run_streams`."""
        return portal.run(
            self._async_batch.run_streams,
            sampling_params,
            stream_ids,
            max_concurrency=max_concurrency,
            timeout=timeout,
        )

    def modify_stream(
        self,
        fn: ModifyFn | Editor,
        stream_ids: Sequence[str] | None = None,
        *,
        max_concurrency: int | None = None,
        timeout: float = 30,
        poll_interval: float = 0.2,
    ) -> float:
        """`modify_kv(fn)` on every stream, in seconds; see `AsyncBatchedStream.modify_stream`."""
        return portal.run(
            self._async_batch.modify_stream,
            fn,
            stream_ids,
            max_concurrency=max_concurrency,
            timeout=timeout,
            poll_interval=poll_interval,
        )

    def get_perf_metrics(
        self, duration: float, fmt: str, width: int, mode: str, stream_ids: Sequence[str] | None = None
    ) -> Metrics:
        """Report the `perf_metrics` of the selected streams; see `AsyncBatchedStream.get_perf_metrics`."""
        return self._async_batch.get_perf_metrics(duration, fmt, width, mode, stream_ids)
