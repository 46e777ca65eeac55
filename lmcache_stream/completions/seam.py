"""Where aiohttp's errors become this package's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from lmcache_stream.completions.faults import excerpt
from lmcache_stream.errors import EngineConnectionError, EngineStreamError, LMCacheError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Seam"]


class Seam:
    """Where aiohttp's errors become this package's."""

    def __init__(self, url: str, idle_timeout: float) -> None:
        self.url = url
        self.answered = False
        self._idle_timeout = idle_timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(exc, LMCacheError) or not isinstance(exc, aiohttp.ClientError | OSError):
            return
        if isinstance(exc, aiohttp.ClientResponseError):
            _forget_request_headers(exc)
            raise EngineStreamError(f"{self.url} answered something that is no HTTP: {excerpt(exc.message)}") from exc
        if isinstance(exc, aiohttp.SocketTimeoutError):
            reason = f"nothing came for {self._idle_timeout:g} s (idle_timeout)"
        elif isinstance(exc, aiohttp.ServerDisconnectedError):
            reason = "the connection was closed"
        else:
            reason = excerpt(str(exc)) or ("time ran out" if isinstance(exc, TimeoutError) else type(exc).__name__)
        if self.answered:
            raise EngineStreamError(f"the stream of {self.url} broke off: {reason}") from exc
        unreached = isinstance(exc, aiohttp.ClientConnectorError)
        question = " (is the engine running, and its address right?)" if unreached else ""
        raise EngineConnectionError(f"{self.url} gave no answer: {reason}{question}") from exc


def _forget_request_headers(exc: aiohttp.ClientResponseError) -> None:
    """An error of aiohttp carries the request's headers, the API key among them, and shows them in its repr."""
    bare = exc.request_info
    exc.request_info = aiohttp.RequestInfo(bare.url, bare.method, CIMultiDictProxy(CIMultiDict()), bare.real_url)
    exc.args = (exc.request_info, exc.history)
