"""What runs from the beginning of a `with` to its end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from lmcache_stream import portal

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Entered", "listen"]


class Entered(ABC):
    """Runs inside `async with`; inside a plain `with` it runs on the background loop of the synchronous classes."""

    @abstractmethod
    async def start(self) -> None:
        """Begins to listen."""

    @abstractmethod
    async def stop(self) -> None:
        """Stops listening and ends every connection. A second stop does nothing."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        portal.run(self.start)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        portal.run(self.stop)


async def listen(server: asyncio.Server) -> int:
    """Let a server accept connections; its port."""
    try:
        await server.start_serving()
    except BaseException:
        server.close()
        raise
    port: int = server.sockets[0].getsockname()[1]
    return port
