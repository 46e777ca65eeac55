from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from lmcache_stream.errors import UsageError
from lmcache_stream.testing import TcpProxy


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def proxy(echo: str) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(echo) as proxy:
        yield proxy
    assert proxy.connections == 0


class Client:
    def __init__(self, proxy: TcpProxy) -> None:
        self._port = int(proxy.url.rpartition(":")[2])

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def said(self, data: bytes) -> bytes:
        self.writer.write(data)
        return await asyncio.wait_for(self.reader.readexactly(len(data)), 10)


async def test_bytes_go_through_both_ways_and_ends_do_too(proxy: TcpProxy) -> None:
    data = bytes(range(256)) * 2000
    async with Client(proxy) as client:
        assert await client.said(data) == data
        assert (proxy.connections, proxy.accepted) == (1, 1)
        client.writer.write_eof()
        assert await client.reader.read() == b""
    assert proxy.up.passed == proxy.down.passed == len(data)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_cut_comes_after_exactly_so_many_bytes(proxy: TcpProxy, reset: bool) -> None:
    async with Client(proxy) as client:
        assert await client.said(b"before") == b"before"
        proxy.down.cut(3, reset=reset)
        client.writer.write(b"message")
        if reset:
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await client.reader.readexactly(4)
        else:
            assert await client.reader.read() == b"mes"
    async with Client(proxy) as client:
        assert await client.said(b"message") == b"message"


async def test_a_cut_befalls_so_many_connections(proxy: TcpProxy) -> None:
    proxy.up.cut(2, times=2)
    for _ in range(2):
        async with Client(proxy) as client:
            assert await client.said(b"ab") == b"ab"
            client.writer.write(b"c")
            assert await client.reader.read() == b""
    async with Client(proxy) as client:
        assert await client.said(b"abc") == b"abc"


async def test_what_is_held_comes_when_it_is_healed(proxy: TcpProxy) -> None:
    proxy.down.hold()
    async with Client(proxy) as client:
        answer = asyncio.create_task(client.said(b"hello"))
        while proxy.up.passed < 5:  # noqa: ASYNC110  (nothing tells)
            await asyncio.sleep(0)
        assert proxy.down.passed == 0
        assert not answer.done()
        await asyncio.to_thread(proxy.heal)
        assert await answer == b"hello"


async def test_a_delay_and_a_rate_take_their_time(proxy: TcpProxy) -> None:
    loop = asyncio.get_running_loop()
    async with Client(proxy) as client:
        proxy.up.delay = 0.05
        proxy.down.rate = 2000.0
        begun = loop.time()
        assert await client.said(bytes(200)) == bytes(200)
        assert loop.time() - begun >= 0.1  # less would be too soon; there is no bound on the other side


async def test_refused_and_unreachable(proxy: TcpProxy) -> None:
    proxy.refusing = True
    async with Client(proxy) as client:
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await client.said(b"x")
    proxy.heal()
    async with Client(proxy) as client:
        assert await client.said(b"x") == b"x"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        async with TcpProxy(f"http://127.0.0.1:{closed.getsockname()[1]}") as lonely, Client(lonely) as client:
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await client.said(b"x")


async def test_dropping_cuts_what_is_open(proxy: TcpProxy) -> None:
    async with Client(proxy) as one, Client(proxy) as other:
        await one.said(b"x")
        await other.said(b"x")
        await proxy.drop()
        assert proxy.connections == 0
        assert await one.reader.read() == await other.reader.read() == b""
    async with Client(proxy) as again:
        assert await again.said(b"x") == b"x"


async def test_stopping_lets_go_of_what_is_held(echo: str) -> None:
    async with TcpProxy(echo) as proxy:
        proxy.up.hold()
        client = await Client(proxy).__aenter__()
        client.writer.write(b"x")
        while not proxy.connections:  # noqa: ASYNC110  (nothing tells)
            await asyncio.sleep(0)
    with contextlib.suppress(ConnectionResetError):
        assert await client.reader.read() == b""
    client.writer.close()
    await proxy.stop()


async def test_without_a_loop(echo: str) -> None:
    def talk() -> bytes:
        with (
            TcpProxy(echo) as proxy,
            socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2]))) as client,
        ):
            client.sendall(b"hello")
            return client.recv(5, socket.MSG_WAITALL)

    assert await asyncio.to_thread(talk) == b"hello"


def test_an_address_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="host and a port"):
        TcpProxy("127.0.0.1")
    with pytest.raises(UsageError, match="enter it"):
        _ = TcpProxy("tcp://127.0.0.1:1").url
