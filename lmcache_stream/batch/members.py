"""The streams of a batch, by id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from lmcache_stream.errors import LMCacheBatchedStreamError
from lmcache_stream.stream import AsyncLMCacheStream, LMCacheStream

__all__ = ["Members"]

StreamT = TypeVar("StreamT", AsyncLMCacheStream, LMCacheStream)


class Members(Generic[StreamT]):
    """The streams of a batch, by id."""

    _stream_type: type[StreamT]
    _streams: dict[str, StreamT]

    def add(self, stream: StreamT) -> None:
        """Make `stream` part of the batch, keyed by `stream.stream_id()`.

        Raises:
            LMCacheBatchedStreamError: It is part of it already.
            TypeError: It is a stream of the other face.
        """
        if not isinstance(stream, self._stream_type):
            raise TypeError(
                f"{type(self).__name__} takes {self._stream_type.__name__}, not {type(stream).__name__}: "
                "async batches take async streams, sync batches sync ones"
            )
        if stream.stream_id() in self._streams:
            raise LMCacheBatchedStreamError(f"stream {stream.stream_id()} is in this batch already")
        self._streams[stream.stream_id()] = stream

    def extend(self, streams: Iterable[StreamT]) -> None:
        """`add` each of `streams`."""
        for stream in streams:
            self.add(stream)

    def get_stream(self, stream_id: str) -> StreamT:
        """The stream with that id.

        Raises:
            LMCacheBatchedStreamError: There is none.
        """
        try:
            return self._streams[stream_id]
        except KeyError:
            raise LMCacheBatchedStreamError(f"no stream {stream_id!r} in this batch") from None

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[StreamT]:
        return iter(self._streams.values())

    def __contains__(self, stream_id: object) -> bool:
        return stream_id in self._streams
