"""The context against a running LMCache server, without an engine: a geometry of our own under a name of our own."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_stream.errors import CacheConnectionError, CacheError, CacheTimeout
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.kvcache.mp.context import MPKVCacheContext
from lmcache_stream.kvcache.mp.transport import open_transport
from lmcache_stream.types import CacheKind

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("LMCACHE_STREAM_REAL_PYTHON", REPOSITORY / ".venv-real/bin/python"))
C = 32
GEOMETRY = KVGeometry(num_layers=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, block_size=16, num_heads=4)
POOL_GB = 0.25


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [bound.getsockname()[1] for bound in sockets]
    for bound in sockets:
        bound.close()
    return ports


class RealCacheServer:
    """An LMCache server of its own process group."""

    def __init__(
        self, folder: Path, *, transport: str = "zmq", shared_memory: bool = True, transfer_mode: str = "auto"
    ) -> None:
        self.scheme = "grpc" if transport == "grpc" else "tcp"
        self.port, self.http_port, metrics_port = free_ports(3)
        self.segment = f"test{uuid.uuid4().hex[:12]}" if shared_memory else None
        self.log = folder / f"lmcache-{self.port}.log"
        flags = {
            "--transport": transport,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--http-port": self.http_port,
            "--prometheus-port": metrics_port,
            "--chunk-size": C,
            "--l1-size-gb": POOL_GB,
            "--eviction-policy": "LRU",
            "--supported-transfer-mode": transfer_mode,
            "--max-workers": 2,
        }
        if self.segment is not None:
            flags["--shm-name"] = self.segment
        self._command = [str(PYTHON.with_name("lmcache")), "server", "--disable-metrics", "--no-l1-use-lazy"]
        self._command += [str(word) for flag in flags.items() for word in flag]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def start(self) -> None:
        environment = os.environ | {"LMCACHE_DISABLE_BANNER": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + 90
        while True:
            try:
                self.status()
            except (OSError, ValueError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    pytest.fail(f"the LMCache server did not start:\n{self.log.read_text()[-3000:]}")
                time.sleep(0.1)
            else:
                return

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None
        for left in Path("/dev/shm").glob(f"lmcache_l1_pool_{self.segment}*"):
            left.unlink()

    def status(self) -> Any:
        with urllib.request.urlopen(f"{self.http_url}/status", timeout=5) as answer:
            return json.load(answer)

    def held(self) -> dict[str, int]:
        status = self.status()
        l1 = status["storage_manager"]["l1_manager"]
        counts = {
            "sessions": status["active_sessions"],
            "lookups": status["active_prefetch_jobs"],
            "read locks": l1["read_locked_count"],
            "write locks": l1["write_locked_count"],
        }
        return {name: count for name, count in counts.items() if count}

    def models(self) -> set[str]:
        return {entry["model_name"] for entry in self.status()["non_cuda_context_meta"].values()}


def _skip_without_a_server() -> None:
    if not PYTHON.exists():
        pytest.skip(f"no LMCache server is installed: {PYTHON} is not there")


@pytest.fixture(scope="module", params=["zmq, shared memory", "zmq, pickle", "grpc, shared memory", "grpc, pickle"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCacheServer]:
    _skip_without_a_server()
    transport, way = request.param.split(", ")
    folder = tmp_path_factory.mktemp("lmcache")
    server = RealCacheServer(folder, transport=transport, shared_memory=way == "shared memory")
    try:
        server.start()
        yield server
    finally:
        server.stop()


async def connect(server: RealCacheServer, **options: Any) -> MPKVCacheContext:
    given: dict[str, Any] = {
        "geometry": GEOMETRY,
        "model_name": f"model/{uuid.uuid4().hex}",
        "timeout": 20.0,
        "serve": True,
    }
    return await open_context(server.url, http_url=server.http_url, **(given | options))


@pytest.fixture
async def ctx(server: RealCacheServer) -> AsyncIterator[MPKVCacheContext]:
    context = await connect(server)
    yield context
    await context.close()
    assert server.held() == {}
    assert context.model_name not in server.models()


def made(tokens: int, *, geometry: KVGeometry = GEOMETRY, seed: int = 0) -> tuple[torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (geometry.planes, geometry.num_layers, tokens, geometry.hidden_dim)
    kv = torch.randn(shape, generator=generator).to(geometry.dtype)
    return kv, torch.randint(0, 50_000, (tokens,), generator=generator).tolist()


def same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    return a is not None and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))


async def test_round_trip(server: RealCacheServer, ctx: MPKVCacheContext) -> None:
    kv, tokens = made(10 * C + 5)
    assert await ctx.retrieve(tokens) is None
    assert await ctx.put(kv, tokens, "salt") == StoreOutcome(10, taken=10)
    assert same(await ctx.retrieve(tokens, "salt"), kv[:, :, : 10 * C])
    assert await ctx.lookup(tokens, "salt") == 10 * C
    assert await ctx.retrieve(tokens) is None
    assert await ctx.put(kv, tokens, "salt") == StoreOutcome(10, same=10)
    changed = kv.clone()
    changed[:, :, 3 * C] = 0
    assert await ctx.put(changed, tokens, "salt") == StoreOutcome(10, same=9, kept=1)
    assert same(await ctx.retrieve(tokens, "salt"), kv[:, :, : 10 * C])
    assert server.held() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        {"num_layers": 1, "num_kv_heads": 1, "head_dim": 80},
        {"num_layers": 3, "num_kv_heads": 4, "head_dim": 128},
        {"num_layers": 3, "num_kv_heads": 1, "head_dim": 576, "planes": 1},
        {"num_layers": 2, "num_kv_heads": 4, "head_dim": 64, "world_size": 2},
    ],
)
async def test_geometries(server: RealCacheServer, shape: dict[str, int], dtype: torch.dtype) -> None:
    geometry = KVGeometry(**shape, dtype=dtype, block_size=16)  # type: ignore[arg-type]
    context = await connect(server, geometry=geometry)
    kv, tokens = made(3 * C, geometry=geometry)
    assert await context.put(kv, tokens) == StoreOutcome(3, taken=3)
    assert same(await context.retrieve(tokens), kv)
    assert await context.put(kv + 1, tokens) == StoreOutcome(3, kept=3)
    await context.close()
    assert server.held() == {}


async def test_queries(server: RealCacheServer, ctx: MPKVCacheContext) -> None:
    queries = torch.randn(1, 4, 2 * C, 4 * 64).bfloat16()
    tokens = made(4 * C)[1]
    assert await ctx.put(queries, tokens[: 2 * C], kind=CacheKind.QUERY) == StoreOutcome(2, taken=2)
    assert same(await ctx.retrieve(tokens, kind=CacheKind.QUERY), queries)
    assert await ctx.lookup(tokens) == 0


async def test_another_client_reads_it_back(server: RealCacheServer, ctx: MPKVCacheContext) -> None:
    kv, tokens = made(4 * C)
    await ctx.put(kv, tokens)
    other = await connect(server, model_name=ctx.model_name, serve=False, geometry=None)
    assert same(await other.retrieve(tokens), kv)
    await other.close()


async def test_no_room(server: RealCacheServer) -> None:
    geometry = KVGeometry(num_layers=4, num_kv_heads=8, head_dim=128, dtype=torch.float32, block_size=16)
    context = await connect(server, geometry=geometry)
    tokens = list(range(300 * C))
    kv = torch.zeros(2, 4, 1, 1024).expand(2, 4, len(tokens), 1024)
    assert kv.numel() * 4 > POOL_GB * 2**30
    assert await context.put(kv, tokens) == StoreOutcome(300, missing=300)
    await context.close()
    assert server.held() == {}


async def test_many_streams_twice(server: RealCacheServer, ctx: MPKVCacheContext) -> None:
    async def stream(number: int) -> bool:
        kv, tokens = made(4 * C, seed=number)
        await ctx.put(kv, tokens)
        return same(await ctx.retrieve(tokens), kv)

    for _ in range(2):
        assert all(await asyncio.gather(*(stream(number) for number in range(64))))
        assert server.held() == {}


async def test_cancelled_a_hundred_times(server: RealCacheServer, ctx: MPKVCacheContext) -> None:
    kv, tokens = made(8 * C)
    await ctx.put(kv, tokens)

    async def job(salt: str) -> None:
        await ctx.put(kv, tokens, salt)
        await ctx.retrieve(tokens, salt)
        await ctx.put(kv + 1, tokens)
        await ctx.wait_for([0, *tokens], timeout=5, poll_interval=0.001)

    rng = random.Random(0)
    for number in range(100):
        task = asyncio.create_task(job(f"salt-{number}"))
        await asyncio.sleep(rng.random() * 0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert server.held() == {}
    assert same(await ctx.retrieve(tokens), kv)


async def test_a_commit_whose_answer_is_lost(
    server: RealCacheServer, ctx: MPKVCacheContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ctx._transport.call
    answers: list[Any] = []

    async def losing(operation: wire.Operation[Any], *args: Any, **options: Any) -> Any:
        answer = await call(operation, *args, **options)
        if operation is wire.COMMIT_STORE:
            answers.append(answer)
            if len(answers) == 1:
                raise CacheTimeout("lost")
        return answer

    monkeypatch.setattr(ctx._transport, "call", losing)
    kv, tokens = made(4 * C)
    if server.segment is not None:
        assert await ctx.put(kv, tokens) == StoreOutcome(4, taken=4)
        assert answers == [True, False]
    else:
        with pytest.raises(CacheTimeout, match="lost"):
            await ctx.put(kv, tokens)
        assert answers == [True]
    assert server.held() == {}
    assert same(await ctx.retrieve(tokens), kv)


async def test_a_forgotten_registration(server: RealCacheServer, ctx: MPKVCacheContext) -> None:
    kv, tokens = made(4 * C)
    await ctx.put(kv, tokens)
    transport = open_transport(server.url)
    for name in server.status()["non_cuda_context_meta"]:
        await transport.call(wire.UNREGISTER, int(name), timeout=5)
    await transport.close()
    assert await ctx.put(kv, tokens, "salt") == StoreOutcome(4, taken=4)
    assert same(await ctx.retrieve(tokens, "salt"), kv)
    assert same(await ctx.retrieve(tokens), kv)


async def test_the_segment_outlives_its_clients(server: RealCacheServer, ctx: MPKVCacheContext) -> None:
    kv, tokens = made(2 * C)
    await ctx.put(kv, tokens)
    code = (
        "import asyncio, sys\n"
        "from lmcache_stream.kvcache.mp.connect import open_context\n"
        "async def main():\n"
        "    context = await open_context(sys.argv[1], http_url=sys.argv[2], model_name=sys.argv[3])\n"
        "    print((await context.retrieve(list(map(int, sys.argv[4].split(','))))).shape[2])\n"
        "asyncio.run(main())\n"
    )
    args = [server.url, server.http_url, ctx.model_name, ",".join(map(str, tokens))]
    command = [sys.executable, "-c", code, *args]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert (done.stdout.strip(), done.stderr) == (str(2 * C), "")
    assert same(await ctx.retrieve(tokens), kv)


async def test_killed_and_restarted(server: RealCacheServer) -> None:
    context = await connect(server)
    kv, tokens = made(4 * C)
    await context.put(kv, tokens)
    await asyncio.to_thread(server.kill)
    started = time.monotonic()
    with pytest.raises((CacheConnectionError, CacheTimeout)):
        await context.retrieve(tokens, timeout=10)
    assert time.monotonic() - started < 10
    await asyncio.to_thread(server.start)
    assert await context.retrieve(tokens) is None
    assert await context.put(kv + 1, tokens) == StoreOutcome(4, taken=4)
    assert same(await context.retrieve(tokens), kv + 1)
    second = await connect(server, model_name=context.model_name, serve=False, geometry=None)
    assert same(await second.retrieve(tokens), kv + 1)
    await second.close()
    await context.close()
    assert server.held() == {}


async def test_a_wrong_model(server: RealCacheServer) -> None:
    await _one_error(r"no engine has registered the model 'nobody'", server, model_name="nobody", serve=False)


async def test_not_there(server: RealCacheServer) -> None:
    (port,) = free_ports(1)
    started = time.monotonic()
    with pytest.raises(CacheConnectionError, match=f"tcp://127.0.0.1:{port}"):
        await open_context(
            f"tcp://127.0.0.1:{port}", http_url=server.http_url, model_name="m", geometry=GEOMETRY, serve=True
        )
    with pytest.raises(CacheConnectionError, match="start the LMCache server"):
        await open_context(server.url, http_url=f"http://127.0.0.1:{port}", model_name="m")
    assert time.monotonic() - started < 5


async def test_a_wrong_chunk_size(server: RealCacheServer) -> None:
    geometry = KVGeometry(num_layers=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, chunk_size=2 * C)
    await _one_error("chunk_size", server, geometry=geometry)


async def test_the_wrong_mode(tmp_path: Path) -> None:
    _skip_without_a_server()
    server = RealCacheServer(tmp_path, transfer_mode="lmcache_driven")
    try:
        await asyncio.to_thread(server.start)
        await _one_error("--supported-transfer-mode auto", server)
    finally:
        await asyncio.to_thread(server.stop)


async def _one_error(words: str, server: RealCacheServer, **options: Any) -> None:
    started = time.monotonic()
    with pytest.raises(CacheError, match=words):
        await connect(server, **options)
    assert time.monotonic() - started < 5
