from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lmcache_stream.kvcache as lmc_sdk
from lmcache_stream.errors import UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.context import BACKENDS, AsyncKVCacheContext, KVCacheContext, check_cache_salt, check_tokens
from lmcache_stream.kvcache.memory import EmbeddedCache, MemoryKVCacheContext
from lmcache_stream.types import CacheKind

if TYPE_CHECKING:
    from collections.abc import Iterator

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=3, dtype=torch.float32, num_heads=2)
URL = "memory://context?chunk_size=4"


def kv_of(tokens: int) -> torch.Tensor:
    return torch.randn(2, 2, tokens, 3)


@pytest.fixture
def ctx() -> Iterator[KVCacheContext]:
    with lmc_sdk.connect(URL, geometry=GEOMETRY) as ctx:
        yield ctx


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    assert not EmbeddedCache._by_name


def test_the_documented_calls(ctx: KVCacheContext) -> None:
    tokens = list(range(10))
    kv = kv_of(10)
    assert lmc_sdk.retrieve(ctx, tokens) is None
    assert lmc_sdk.store(ctx, kv=kv, tokens=tokens) is True
    back = lmc_sdk.retrieve(ctx, tokens)
    assert back is not None
    assert torch.equal(back, kv[:, :, :8])
    assert lmc_sdk.retrieve(ctx, tokens, cache_salt="other") is None
    lmc_sdk.close(ctx)
    lmc_sdk.close(ctx)
    with pytest.raises(UsageError, match="closed"):
        lmc_sdk.retrieve(ctx, tokens)


def test_the_methods_do_what_the_functions_do_and_more(ctx: KVCacheContext) -> None:
    tokens = list(range(8))
    assert ctx.put(kv_of(8), tokens).taken == 2
    assert ctx.lookup(tokens) == 8
    assert ctx.wait_for(tokens, timeout=0) == 8
    assert ctx.wait_for([*tokens, 9, 9, 9, 9], timeout=0) == 8
    assert ctx.store(torch.randn(1, 2, 8, 6), tokens, kind=CacheKind.QUERY)
    assert ctx.retrieve(tokens, kind=CacheKind.QUERY) is not None
    assert ctx.chunk_size == 4
    assert ctx.geometry is not None
    assert ctx.geometry.num_layers == 2
    assert (ctx.model_name, ctx.timeout) == ("default", 60.0)
    assert isinstance(ctx.async_context, MemoryKVCacheContext)
    assert ctx.executor is ctx.async_context.executor


async def test_the_synchronous_face_works_under_a_running_loop() -> None:
    with lmc_sdk.connect(URL, geometry=GEOMETRY) as ctx:
        assert ctx.store(kv_of(4), range(4))


def test_it_works_in_many_threads_at_once(ctx: KVCacheContext) -> None:
    back: list[bool] = []

    def work(i: int) -> None:
        kv = kv_of(8)
        ctx.store(kv, [i] * 8)
        found = ctx.retrieve([i] * 8)
        back.append(found is not None and torch.equal(found, kv))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert back == [True] * 20


async def test_aconnect_can_be_awaited_or_entered() -> None:
    ctx = await lmc_sdk.aconnect(URL, geometry=GEOMETRY)
    async with ctx:
        assert await ctx.store(kv_of(4), range(4))
        async with lmc_sdk.aconnect(URL, geometry=GEOMETRY) as other:
            assert await other.lookup(range(4)) == 4
        with pytest.raises(UsageError, match="closed"):
            await other.lookup(range(4))
        assert await ctx.lookup(range(4)) == 4


async def test_aconnect_that_is_never_awaited_opens_nothing() -> None:
    lmc_sdk.aconnect(URL, geometry=GEOMETRY)
    assert not EmbeddedCache._by_name


@pytest.mark.parametrize("url", [None, ...])
def test_without_a_url_the_environment_says_where(url: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_STREAM_KV_URL", "memory://from-environment?chunk_size=8")
    with lmc_sdk.connect(url=url, http_url=..., geometry=GEOMETRY) as ctx:
        assert ctx.chunk_size == 8
    monkeypatch.delenv("LMCACHE_STREAM_KV_URL")
    with lmc_sdk.connect(url=url, http_url=..., geometry=GEOMETRY) as ctx:
        assert isinstance(ctx.async_context, MemoryKVCacheContext)
        assert ctx.async_context.cache.name == "default"


@pytest.mark.parametrize(
    ("given", "set_to", "expected"),
    [(..., "http://h:1", "http://h:1"), (..., None, None), (None, "http://h:1", None), ("http://x", None, "http://x")],
)
async def test_http_url_and_the_rest_reach_the_backend(
    given: Any, set_to: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if set_to is None:
        monkeypatch.delenv("LMCACHE_STREAM_KV_HTTP_URL", raising=False)
    else:
        monkeypatch.setenv("LMCACHE_STREAM_KV_HTTP_URL", set_to)
    seen: dict[str, Any] = {}

    async def spy(url: str, **kwargs: Any) -> MemoryKVCacheContext:
        seen.update(kwargs, url=url)
        return MemoryKVCacheContext(EmbeddedCache.open(URL), "m", GEOMETRY)

    monkeypatch.setattr("lmcache_stream.kvcache.memory.open_context", spy)
    probe: Any = print
    async with lmc_sdk.aconnect("memory://x", given, "m", 5, geometry=GEOMETRY, probe=probe):
        pass
    assert seen == {
        "url": "memory://x",
        "http_url": expected,
        "model_name": "m",
        "timeout": 5.0,
        "geometry": GEOMETRY,
        "probe": probe,
    }


@pytest.mark.parametrize(
    ("http_url", "set_to", "expected"),
    [(None, "http://h:1", "http://h:1"), (None, None, None), ("http://x", "http://h:1", "http://x")],
)
async def test_a_url_of_the_environment_comes_with_its_http_url(
    http_url: str | None, set_to: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_STREAM_KV_URL", "tcp://h:2")
    monkeypatch.setenv("LMCACHE_STREAM_KV_HTTP_URL", set_to or "")
    seen: list[tuple[str, str | None]] = []

    async def spy(url: str, *, http_url: str | None, **_: Any) -> MemoryKVCacheContext:
        seen.append((url, http_url))
        return MemoryKVCacheContext(EmbeddedCache.open(URL), "m", GEOMETRY)

    monkeypatch.setattr("lmcache_stream.kvcache.mp.connect.open_context", spy)
    async with lmc_sdk.aconnect(None, http_url):
        pass
    assert seen == [("tcp://h:2", expected)]


@pytest.mark.parametrize("url", ["", "localhost:5555", "http://x", "redis://x", "memory:x", 5])
def test_a_url_that_no_backend_serves_is_refused_with_those_known(url: Any) -> None:
    with pytest.raises(UsageError, match="memory://"):
        lmc_sdk.connect(url)


def test_the_schemes_of_the_registry() -> None:
    assert sorted(BACKENDS) == ["grpc", "grpc+unix", "ipc", "memory", "tcp"]


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", None])
def test_a_time_that_cannot_be_is_refused(timeout: Any) -> None:
    with pytest.raises(UsageError, match="timeout"):
        lmc_sdk.connect(URL, timeout=timeout, geometry=GEOMETRY)


async def test_the_functions_refuse_an_async_context() -> None:
    async with lmc_sdk.aconnect(URL, geometry=GEOMETRY) as ctx:
        wrong: Any = ctx
        with pytest.raises(TypeError, match=r"await ctx\.retrieve"):
            lmc_sdk.retrieve(wrong, [1])
        with pytest.raises(TypeError, match=r"await ctx\.store"):
            lmc_sdk.store(wrong, kv_of(4), range(4))
        with pytest.raises(TypeError, match=r"await ctx\.close"):
            lmc_sdk.close(wrong)
    nothing: Any = None
    with pytest.raises(TypeError, match="NoneType"):
        lmc_sdk.close(nothing)
    with pytest.raises(TypeError, match="NoneType"):
        KVCacheContext(nothing)


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_the_twins_have_the_same_members() -> None:
    attributes = set(inspect.get_annotations(AsyncKVCacheContext))
    assert public(KVCacheContext) - {"async_context"} == public(AsyncKVCacheContext) | attributes


@pytest.mark.parametrize("name", ["retrieve", "put", "store", "lookup", "wait_for", "close"])
def test_the_twins_have_the_same_signatures_and_docstrings(name: str) -> None:
    ours, theirs = getattr(KVCacheContext, name), getattr(AsyncKVCacheContext, name)
    assert (
        inspect.signature(ours) == inspect.signature(theirs) == inspect.signature(getattr(MemoryKVCacheContext, name))
    )
    assert not inspect.iscoroutinefunction(ours)
    assert inspect.iscoroutinefunction(theirs)
    assert inspect.getdoc(ours) == inspect.getdoc(theirs)


def test_the_twins_are_connected_alike() -> None:
    ours, theirs = inspect.signature(lmc_sdk.connect), inspect.signature(lmc_sdk.aconnect)
    assert ours.parameters == theirs.parameters
    assert [*ours.parameters] == ["url", "http_url", "model_name", "timeout", "geometry", "probe"]


def test_ids_of_any_integer_sequence_are_taken() -> None:
    for ids in ([1, 2], (1, 2), range(1, 3), torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32).numpy()):
        taken: Any = ids
        assert check_tokens(taken).tolist() == [1, 2]
        assert check_tokens(taken).dtype.name == "int64"
    assert check_tokens([]).tolist() == []


def test_a_fine_salt_is_given_back() -> None:
    assert check_cache_salt("tenant:7 äö") == "tenant:7 äö"


async def test_two_loops_use_one_context() -> None:
    async with lmc_sdk.aconnect(URL, geometry=GEOMETRY) as ctx:
        kv = kv_of(4)
        assert await asyncio.to_thread(lambda: asyncio.run(ctx.store(kv, range(4))))
        assert await ctx.lookup(range(4)) == 4


@pytest.mark.parametrize("name", ["", "a\nb", "a\0", "\ud800", 5])
def test_a_name_that_no_model_has(name: Any) -> None:
    with pytest.raises(UsageError, match="model_name"):
        lmc_sdk.connect(URL, model_name=name, geometry=GEOMETRY)


@pytest.mark.parametrize(
    ("url", "http_url"),
    [
        ("tcp://user:hunter2@localhost:5555", "http://localhost:8080"),
        ("grpc://hunter2@localhost:5555", "http://localhost:8080"),
        ("tcp://localhost:5555", "http://user:hunter2@localhost:8080"),
        ("tcp://localhost:5555", "http://localhost:8080/?key=hunter2"),
        ("https://user:hunter2@localhost:8080", None),
        ("tcp://user:hunter2/x@localhost:5555", "http://localhost:8080"),
    ],
)
def test_an_address_with_a_secret_is_refused_and_not_repeated(url: str, http_url: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        lmc_sdk.connect(url, http_url, "m")
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_contexts_opened_side_by_side_wait_for_the_first_import() -> None:
    code = (
        "import asyncio; from lmcache_stream import aconnect, CacheConnectionError\n"
        "async def refused(delay):\n"
        "    await asyncio.sleep(delay)\n"
        "    try: await aconnect('tcp://127.0.0.1:1', 'http://127.0.0.1:1')\n"
        "    except CacheConnectionError: pass\n"
        "async def main(): await asyncio.gather(*(refused(number / 20) for number in range(60)))\n"
        "asyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
