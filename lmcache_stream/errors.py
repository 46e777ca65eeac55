"""What can go wrong, as a tree.

::

    LMCacheError
    ├── UsageError                    you used it wrong; nothing was sent and nothing changed
    ├── LMCacheStreamError            a stream's operation failed at a server
    │   ├── StreamTimeout             ... or did not end in time
    │   │   └── CoverageTimeout       the cache did not come to cover the prompt in time
    │   ├── StoreError                an edit was not taken whole by the cache
    │   └── EditNotUsed               the engine did not decode from the stored edit
    ├── LMCacheBatchedStreamError     streams of a batch failed; the others keep their metrics
    ├── EngineError                   what an engine did, outside any stream
    │   ├── EngineConnectionError     it cannot be reached
    │   ├── EngineResponseError       it answered with an error
    │   └── EngineStreamError         its token stream broke off, stalled or made no sense
    └── CacheError                    what a cache did, outside any stream
        ├── CacheConnectionError      it cannot be reached
        ├── CacheTimeout              it did not answer a request in time
        ├── CacheProtocolError        it answered something that makes no sense
        └── GeometryError             the shape of its KV is unknown or contradictory

Out of a stream come `UsageError`, `LMCacheStreamError`, the editor's own exceptions unchanged, and cancellation, never
wrapped; what an engine or a cache did is the `__cause__`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lmcache_stream.metrics import Metrics

__all__ = [
    "CacheConnectionError",
    "CacheError",
    "CacheProtocolError",
    "CacheTimeout",
    "CoverageTimeout",
    "EditNotUsed",
    "EngineConnectionError",
    "EngineError",
    "EngineResponseError",
    "EngineStreamError",
    "GeometryError",
    "LMCacheBatchedStreamError",
    "LMCacheError",
    "LMCacheStreamError",
    "StoreError",
    "StreamTimeout",
    "UsageError",
]


class LMCacheError(Exception):
    """Base of every error that this package raises. It can be copied and pickled, which leaves its causes behind."""

    def __reduce__(self) -> tuple[Callable[..., LMCacheError], tuple[object, ...], dict[str, object]]:
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[LMCacheError], args: tuple[object, ...]) -> LMCacheError:
    # Without `__init__`, which need not take `args`; and Python refuses the `__new__` of the base that comes first.
    base = OSError if issubclass(kind, OSError) else Exception
    error = base.__new__(kind)
    error.args = args
    return error


class UsageError(LMCacheError, ValueError):
    """A call that cannot be right. Nothing was sent, nothing changed; the message says what to do instead."""


class LMCacheStreamError(LMCacheError, RuntimeError):
    """A stream's operation failed at the engine or at the cache; the cause is chained.

    Attributes:
        arrived: Tokens that came before the failure. They are part of the stream's `tokens`.
        suffix_consumed: Whether the pending and the caller's suffix are part of `tokens` now. If not, nothing
            changed and the same call may be repeated.
    """

    def __init__(self, message: str, *, arrived: int = 0, suffix_consumed: bool = False) -> None:
        super().__init__(message)
        self.arrived = arrived
        self.suffix_consumed = suffix_consumed


class StreamTimeout(LMCacheStreamError, TimeoutError):
    """A stream's operation did not end within its `timeout` (seconds)."""


class CoverageTimeout(StreamTimeout):
    """The cache did not cover the whole chunks of what was sent in time.

    Attributes:
        seen: Tokens that the cache covered when time ran out.
        wanted: Tokens that it should have covered.
    """

    def __init__(self, message: str, *, seen: int, wanted: int) -> None:
        super().__init__(message)
        self.seen = seen
        self.wanted = wanted


class StoreError(LMCacheStreamError):
    """The cache did not take every chunk of an edit. The stream is as it was before."""


class EditNotUsed(LMCacheStreamError):
    """The engine did not take the whole stored edit from the cache, so it decoded from something else.

    Attributes:
        stored: Tokens of the edit that lie in the cache, or should.
        used: Tokens that were found there: by a lookup before the request, or by the engine.
    """

    def __init__(
        self, message: str, *, stored: int, used: int, arrived: int = 0, suffix_consumed: bool = False
    ) -> None:
        super().__init__(message, arrived=arrived, suffix_consumed=suffix_consumed)
        self.stored = stored
        self.used = used


class LMCacheBatchedStreamError(LMCacheError, RuntimeError):
    """A batch was used wrongly, or some of its streams failed.

    Attributes:
        failures: Exception by stream id; empty when nothing ran.
        metrics: The report over the streams that succeeded; None when nothing ran.
    """

    def __init__(
        self, message: str, *, failures: Mapping[str, BaseException] | None = None, metrics: Metrics | None = None
    ) -> None:
        super().__init__(message)
        self.failures: dict[str, BaseException] = dict(failures or {})
        self.metrics = metrics


class EngineError(LMCacheError):
    """An engine failed."""


class EngineConnectionError(EngineError, ConnectionError):
    """An engine cannot be reached, or the connection broke before the first byte of an answer."""


class EngineResponseError(EngineError):
    """An engine answered with an error: an HTTP status, or HTTP 200 and an error inside the stream.

    Attributes:
        status: The HTTP status of the response (200 for an error inside the stream).
        message: The server's own words.
        type: The server's name of the error, if it gave one.
        param: The request parameter at fault, if it gave one.
        code: The server's error code, if it gave one.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str | None = None,
        param: str | None = None,
        code: int | str | None = None,
    ) -> None:
        super().__init__(message if status == 200 else f"HTTP {status}: {message}")
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code


class EngineStreamError(EngineError):
    """A token stream broke off, stalled, or holds something that is no token stream."""


class CacheError(LMCacheError):
    """A cache failed."""


class CacheConnectionError(CacheError, ConnectionError):
    """A cache cannot be reached, or is no cache that this client can talk to."""


class CacheTimeout(CacheError, TimeoutError):
    """A cache did not answer a request in time. That is no miss: what it holds is not known."""


class CacheProtocolError(CacheError):
    """A cache answered something that makes no sense."""


class GeometryError(CacheError, ValueError):
    """The shape of the KV is not known, or two sources contradict each other; the message names both."""
