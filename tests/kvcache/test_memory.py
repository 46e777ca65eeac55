from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.errors import CacheTimeout, UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.memory import EmbeddedCache, MemoryKVCacheContext, open_context
from lmcache_stream.transfer import TransferExecutor
from lmcache_stream.types import CacheKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LAYERS, HEADS, HEAD_DIM = 2, 1, 3
GEOMETRY = KVGeometry(
    num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32, num_heads=2 * HEADS
)
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 4


def kv_of(tokens: int, *, fill: float | None = None) -> torch.Tensor:
    shape = (2, LAYERS, tokens, HEADS * HEAD_DIM)
    return torch.randn(shape) if fill is None else torch.full(shape, float(fill))


def chunks_of(kv: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [kv.narrow(2, start, size) for start in range(0, kv.shape[2] - size + 1, size)]


@contextmanager
def opened(url: str) -> Iterator[EmbeddedCache]:
    cache = EmbeddedCache.open(url)
    try:
        yield cache
    finally:
        cache.close()
        assert cache.name not in EmbeddedCache._by_name


@pytest.fixture
def cache() -> Iterator[EmbeddedCache]:
    with opened("memory://test?chunk_size=4") as cache:
        yield cache


@pytest.fixture
async def ctx(cache: EmbeddedCache) -> Any:
    async with await open_context("memory://test", model_name="m", geometry=GEOMETRY) as ctx:
        yield ctx


# --- one cache a name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "name", "chunk_size", "max_bytes"),
    [
        ("memory://", "default", 32, 2 << 30),
        ("memory://a-b.c", "a-b.c", 32, 2 << 30),
        ("memory://x?chunk_size=16", "x", 16, 2 << 30),
        ("memory://x?max_bytes=12345", "x", 32, 12345),
        ("memory://x?max_bytes=3MiB&chunk_size=8", "x", 8, 3 << 20),
        ("memory://x?max_bytes=3mb", "x", 32, 3_000_000),
        ("memory://x?max_bytes=1TiB", "x", 32, 1 << 40),
    ],
)
def test_a_url_names_a_cache(url: str, name: str, chunk_size: int, max_bytes: int) -> None:
    with opened(url) as cache:
        assert (cache.name, cache.chunk_size, cache.max_bytes) == (name, chunk_size, max_bytes)


@pytest.mark.parametrize(
    "url",
    [
        "memory:x",
        "tcp://x",
        "memory://x/y",
        "memory://x#y",
        "memory://x?chunk_size=0",
        "memory://x?chunk_size=-1",
        "memory://x?chunk_size=2.5",
        "memory://x?chunk_size=",
        "memory://x?max_bytes=2Gigs",
        "memory://x?max_bytes=0",
        "memory://x?size=3",
    ],
)
def test_a_url_that_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        EmbeddedCache.open(url)
    assert not EmbeddedCache._by_name


def test_a_name_is_one_cache_until_the_last_reference_goes() -> None:
    with opened("memory://shared?chunk_size=4") as first:
        first.put("m", range(4), [kv_of(4)])
        second = EmbeddedCache.open("memory://shared")
        assert second is first
        second.close()
        assert first.covered("m", range(4)) == 4
    with opened("memory://shared?chunk_size=8") as fresh:
        assert fresh is not first
        assert fresh.covered("m", range(8)) == 0
    with pytest.raises(UsageError, match="closed"):
        first.put("m", range(4), [kv_of(4)])


def test_conflicting_parameters_are_refused_and_take_no_reference() -> None:
    with opened("memory://shared?chunk_size=4&max_bytes=1MiB"):
        with pytest.raises(UsageError, match="chunk_size=4, not 8"):
            EmbeddedCache.open("memory://shared?chunk_size=8")
        with pytest.raises(UsageError, match="max_bytes=1048576, not 2097152"):
            EmbeddedCache.open("memory://shared?max_bytes=2MiB")


def test_models_are_counted(cache: EmbeddedCache) -> None:
    cache.register_model("m", GEOMETRY)
    cache.register_model("m", GEOMETRY)
    assert cache.models()["m"].chunk_size == 4
    cache.unregister_model("m")
    assert list(cache.models()) == ["m"]
    cache.unregister_model("m")
    assert cache.models() == {}


def test_a_model_of_another_shape_is_refused(cache: EmbeddedCache) -> None:
    cache.register_model("m", GEOMETRY)
    with pytest.raises(UsageError, match="num_layers is 2, not 3"):
        cache.register_model("m", KVGeometry(num_layers=3, num_kv_heads=HEADS, head_dim=HEAD_DIM))
    with pytest.raises(UsageError, match="chunk_size=16"):
        cache.register_model("n", KVGeometry(num_layers=3, num_kv_heads=HEADS, head_dim=HEAD_DIM, chunk_size=16))
    assert list(cache.models()) == ["m"]


# --- what a prefix is ---------------------------------------------------------------------------------------------

ids = st.lists(st.integers(0, 2), max_size=14)
puts = st.tuples(ids, st.sampled_from(["", "salt"]), st.sampled_from(list(CacheKind)), st.sampled_from(["m", "n"]))


@settings(deadline=None, max_examples=60)
@given(chunk_size=st.integers(1, 5), stored=st.lists(puts, max_size=8), asked=puts)
def test_the_longest_prefix_is_that_of_a_naive_model(
    chunk_size: int,
    stored: list[tuple[list[int], str, CacheKind, str]],
    asked: tuple[list[int], str, CacheKind, str],
) -> None:
    naive: dict[tuple[object, ...], torch.Tensor] = {}

    def identities(tokens: Sequence[int], *root: object) -> list[tuple[object, ...]]:
        ends = range(chunk_size, len(tokens) + 1, chunk_size)
        return [(*root, tuple(tokens[:end])) for end in ends]

    with opened(f"memory://naive?chunk_size={chunk_size}") as cache:
        for tokens, salt, kind, model in stored:
            chunks = chunks_of(kv_of(len(tokens)), chunk_size)
            outcome = cache.put(model, tokens, chunks, salt, kind)
            keys = identities(tokens, salt, kind, model)
            new = [key not in naive for key in keys]
            assert outcome == StoreOutcome(chunks=len(keys), taken=sum(new), kept=len(keys) - sum(new))
            for key, chunk in zip(keys, chunks, strict=True):
                naive.setdefault(key, chunk)
        tokens, salt, kind, model = asked
        expected: list[torch.Tensor] = []
        for key in identities(tokens, salt, kind, model):
            if key not in naive:
                break
            expected.append(naive[key])
        found = cache.longest_prefix(model, tokens, salt, kind)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert cache.covered(model, tokens, salt, kind) == len(expected) * chunk_size


def test_a_later_chunk_is_not_found_under_another_beginning(cache: EmbeddedCache) -> None:
    cache.put("m", [1, 1, 1, 1, 2, 2, 2, 2], chunks_of(kv_of(8), 4))
    assert cache.covered("m", [3, 3, 3, 3, 2, 2, 2, 2]) == 0
    assert cache.covered("m", [2, 2, 2, 2]) == 0


# --- what became of a put -----------------------------------------------------------------------------------------


def test_a_put_tells_taken_same_kept_and_missing() -> None:
    with opened(f"memory://small?chunk_size=4&max_bytes={3 * 4 * TOKEN_BYTES}") as cache:
        kv = kv_of(16)
        assert cache.put("m", range(16), chunks_of(kv, 4)) == StoreOutcome(chunks=4, taken=3, missing=1)
        assert cache.covered("m", range(16)) == 12
        other = kv.clone()
        other[:, :, 4:8] += 1
        assert cache.put("m", range(16), chunks_of(other, 4)) == StoreOutcome(chunks=4, same=2, kept=1, missing=1)
        found = torch.cat(cache.longest_prefix("m", range(16)), dim=2)
        assert torch.equal(found, kv[:, :, :12])


def test_same_means_the_very_same_bytes(cache: EmbeddedCache) -> None:
    def outcome_after(first: torch.Tensor, second: torch.Tensor) -> StoreOutcome:
        cache.clear()
        cache.put("m", range(4), [first])
        return cache.put("m", range(4), [second])

    nan = kv_of(4, fill=float("nan"))
    assert outcome_after(nan, nan.clone()).same == 1
    assert outcome_after(kv_of(4, fill=0.0), kv_of(4, fill=-0.0)).kept == 1
    assert outcome_after(kv_of(4, fill=1.0), kv_of(4, fill=1.0).double()).kept == 1
    strided = kv_of(8)[:, :, ::2]
    assert outcome_after(strided, strided.contiguous()).same == 1


def test_a_chunk_without_room_is_missing() -> None:
    with opened(f"memory://tiny?chunk_size=4&max_bytes={4 * TOKEN_BYTES - 1}") as cache:
        assert cache.put("m", range(4), [kv_of(4)]) == StoreOutcome(chunks=1, missing=1)
        assert cache.covered("m", range(4)) == 0


def test_a_put_never_makes_room_by_dropping_its_own_beginning() -> None:
    with opened(f"memory://tight?chunk_size=4&max_bytes={2 * 4 * TOKEN_BYTES}") as cache:
        cache.put("m", range(4), [kv_of(4).double()])
        assert cache.put("m", range(8), chunks_of(kv_of(8), 4)) == StoreOutcome(chunks=2, kept=1, missing=1)
        assert cache.covered("m", range(8)) == 4


def test_chunks_that_cannot_be_are_refused(cache: EmbeddedCache) -> None:
    with pytest.raises(UsageError, match="2 chunks were given for 1 whole"):
        cache.put("m", range(4), [kv_of(4), kv_of(4)])
    with pytest.raises(UsageError, match=r"\[planes, L, 4, D\]"):
        cache.put("m", range(4), [kv_of(3)])
    with pytest.raises(UsageError, match="same shape"):
        cache.put("m", range(8), [kv_of(4), kv_of(4)[:1]])


def test_a_put_keeps_copies(cache: EmbeddedCache) -> None:
    kv = kv_of(4)
    before = kv.clone()
    cache.put("m", range(4), [kv])
    kv.zero_()
    [stored] = cache.longest_prefix("m", range(4))
    assert torch.equal(stored, before)


# --- the bound ----------------------------------------------------------------------------------------------------


def test_the_least_recently_used_prefix_goes_first_and_its_tail_before_its_head() -> None:
    with opened(f"memory://lru?chunk_size=4&max_bytes={4 * 4 * TOKEN_BYTES}") as cache:
        old, new, third = range(8), range(100, 108), range(200, 204)
        cache.put("m", old, chunks_of(kv_of(8), 4))
        cache.put("m", new, chunks_of(kv_of(8), 4))
        cache.put("m", third, chunks_of(kv_of(4), 4))
        assert [cache.covered("m", ids) for ids in (third, new, old)] == [4, 8, 4]


@pytest.mark.parametrize("use", ["longest_prefix", "covered"])
def test_use_protects_a_prefix(use: str) -> None:
    with opened(f"memory://lru?chunk_size=4&max_bytes={2 * 4 * TOKEN_BYTES}") as cache:
        cache.put("m", [0] * 4, [kv_of(4)])
        cache.put("m", [1] * 4, [kv_of(4)])
        getattr(cache, use)("m", [0] * 4)
        cache.put("m", [2] * 4, [kv_of(4)])
        assert [cache.covered("m", [i] * 4) for i in range(3)] == [4, 0, 4]


bounded_puts = st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.booleans()), max_size=25)


@settings(deadline=None, max_examples=60)
@given(room=st.integers(1, 7), steps=bounded_puts)
def test_the_bound_holds_and_every_chunk_can_be_reached(room: int, steps: list[tuple[list[int], bool]]) -> None:
    with opened(f"memory://bound?chunk_size=1&max_bytes={room * TOKEN_BYTES}") as cache:
        seen: set[tuple[int, ...]] = set()
        for tokens, store in steps:
            if store:
                outcome = cache.put("m", tokens, chunks_of(kv_of(len(tokens)), 1))
                seen |= {tuple(tokens[:end]) for end in range(1, len(tokens) + 1)}
                assert outcome.taken + outcome.kept + outcome.missing == len(tokens)
                assert cache.covered("m", tokens) == min(len(tokens), room)
            else:
                cache.longest_prefix("m", tokens)
            held = len(cache._chunks)
            assert cache._bytes == sum(chunk.nbytes for chunk in cache._chunks.values()) <= cache.max_bytes
            order = list(cache._chunks)
            reachable = sum(cache._keys("m", ids, "", CacheKind.KV)[-1] in cache._chunks for ids in seen)
            assert list(cache._chunks) == order
            assert reachable == held
            for ids in seen:
                keys = cache._keys("m", ids, "", CacheKind.KV)
                there = [key in cache._chunks for key in keys]
                assert there == sorted(there, reverse=True)


def test_clear_drops_every_chunk(cache: EmbeddedCache) -> None:
    cache.put("m", range(8), chunks_of(kv_of(8), 4))
    cache.clear()
    assert cache.covered("m", range(8)) == 0
    assert cache.put("m", range(8), chunks_of(kv_of(8), 4)).taken == 2


def test_a_forked_child_sees_an_empty_cache_of_its_own() -> None:
    source = """
import os, torch, warnings
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.transfer import default_executor
warnings.simplefilter("ignore", DeprecationWarning)
cache = EmbeddedCache.open("memory://x?chunk_size=4")
cache.put("m", range(4), [torch.zeros(2, 1, 4, 1)])
default_executor().submit(int).result(30)
child = os.fork()
if child == 0:
    own = EmbeddedCache.open("memory://x?chunk_size=4")
    fine = own.covered("m", range(4)) == 0 and default_executor().submit(int).result(30) == 0
    os._exit(0 if fine else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), cache.covered("m", range(4)))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "0 4\n", done.stderr


# --- threads ------------------------------------------------------------------------------------------------------


def test_many_threads_put_and_read_at_once() -> None:
    prompts = [[i % 5, i % 3, i % 2, 7] * 4 for i in range(30)]
    with opened(f"memory://busy?chunk_size=4&max_bytes={20 * 4 * TOKEN_BYTES}") as cache:
        wrong: list[str] = []

        def work(seed: int) -> None:
            for turn in range(40):
                tokens = prompts[(seed * 7 + turn) % len(prompts)]
                cache.put("m", tokens, chunks_of(kv_of(16, fill=float(tokens[0])), 4))
                wrong.extend(
                    f"{tokens[0]} holds {chunk[0, 0, 0, 0]}"
                    for chunk in cache.longest_prefix("m", tokens)
                    if not (chunk == float(tokens[0])).all()
                )

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert cache._bytes == sum(chunk.nbytes for chunk in cache._chunks.values()) <= cache.max_bytes


# --- waiting ------------------------------------------------------------------------------------------------------


async def until_waiting(cache: EmbeddedCache, waiters: int) -> None:
    while sum(map(len, cache._waiters.values())) < waiters:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_put_from_another_thread_wakes_a_waiter(cache: EmbeddedCache) -> None:
    waiting = asyncio.create_task(cache.wait_covered("m", range(10), timeout=60))
    await until_waiting(cache, 1)
    await asyncio.to_thread(cache.put, "m", range(4), [kv_of(4)])
    await asyncio.sleep(0)
    assert not waiting.done()
    await asyncio.to_thread(cache.put, "m", range(10), chunks_of(kv_of(10), 4))
    assert await waiting == 8
    assert not cache._waiters


async def test_waiters_on_two_loops_are_woken(cache: EmbeddedCache) -> None:
    covered: list[int] = []
    thread = threading.Thread(target=lambda: covered.append(asyncio.run(cache.wait_covered("m", range(8), timeout=60))))
    thread.start()
    here = asyncio.create_task(cache.wait_covered("m", range(8), timeout=60))
    await until_waiting(cache, 2)
    cache.put("m", range(8), chunks_of(kv_of(8), 4))
    assert await here == 8
    await asyncio.to_thread(thread.join, 30)
    assert covered == [8]
    assert not cache._waiters


async def test_what_is_covered_already_is_not_waited_for(cache: EmbeddedCache) -> None:
    cache.put("m", range(8), chunks_of(kv_of(8), 4))
    assert await cache.wait_covered("m", range(11), timeout=0) == 8
    assert await cache.wait_covered("m", range(3), timeout=60) == 0


async def test_a_wait_that_runs_out_tells_what_is_covered(cache: EmbeddedCache) -> None:
    cache.put("m", range(4), [kv_of(4)])
    assert await cache.wait_covered("m", range(8), timeout=0.01) == 4
    assert not cache._waiters


async def test_a_cancelled_wait_leaves_nothing(cache: EmbeddedCache) -> None:
    waiting = [asyncio.create_task(cache.wait_covered("m", range(8), timeout=60)) for _ in range(2)]
    await until_waiting(cache, 2)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert sum(map(len, cache._waiters.values())) == 1
    waiting[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[1]
    assert not cache._waiters


async def test_a_chunk_evicted_before_its_waiter_looks_is_waited_for_again() -> None:
    with opened(f"memory://one?chunk_size=4&max_bytes={4 * TOKEN_BYTES}") as cache:
        waiting = asyncio.create_task(cache.wait_covered("m", range(4), timeout=60))
        await until_waiting(cache, 1)
        cache.put("m", range(4), [kv_of(4)])
        cache.put("m", range(4, 8), [kv_of(4)])  # the loop has not turned in between
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        cache.put("m", range(4), [kv_of(4)])
        assert await waiting == 4


async def test_a_dropped_cache_ends_its_waits() -> None:
    cache = EmbeddedCache.open("memory://gone")
    waiting = asyncio.create_task(cache.wait_covered("m", range(32), timeout=60))
    await until_waiting(cache, 1)
    cache.close()
    with pytest.raises(UsageError, match="closed"):
        await waiting


# --- the context --------------------------------------------------------------------------------------------------


async def test_what_is_stored_comes_back(ctx: MemoryKVCacheContext) -> None:
    kv = kv_of(11)
    assert await ctx.store(kv, list(range(11)))
    assert await ctx.lookup(range(11)) == 8
    back = await ctx.retrieve(range(11))
    assert back is not None
    assert back.is_contiguous()
    assert torch.equal(back, kv[:, :, :8])
    assert await ctx.retrieve(range(6)) is not None
    assert await ctx.retrieve(range(3)) is None
    assert await ctx.retrieve([]) is None
    assert await ctx.retrieve(range(11), "salt") is None


async def test_less_than_a_chunk_stores_nothing(ctx: MemoryKVCacheContext) -> None:
    assert await ctx.put(kv_of(3), range(3)) == StoreOutcome(chunks=0)


async def test_edits_in_place_stay_outside_the_cache(ctx: MemoryKVCacheContext) -> None:
    kv = kv_of(8)
    before = kv.clone()
    await ctx.put(kv, range(8))
    kv.zero_()
    first = await ctx.retrieve(range(8))
    assert first is not None
    first.zero_()
    second = await ctx.retrieve(range(8))
    assert second is not None
    assert torch.equal(second, before)


async def test_a_second_store_of_other_bytes_is_no_success(ctx: MemoryKVCacheContext) -> None:
    assert await ctx.store(kv_of(8, fill=1), range(8))
    assert await ctx.store(kv_of(8, fill=1), range(8))
    assert not await ctx.store(kv_of(8, fill=2), range(8))
    assert await ctx.store(kv_of(8, fill=2), range(8), "salt")


async def test_queries_have_a_shape_and_a_coverage_of_their_own(ctx: MemoryKVCacheContext) -> None:
    queries = torch.randn(1, LAYERS, 4, 2 * HEADS * HEAD_DIM)
    await ctx.put(kv_of(8), range(8))
    await ctx.put(queries, range(4), kind=CacheKind.QUERY)
    assert await ctx.lookup(range(8), kind=CacheKind.QUERY) == 4
    back = await ctx.retrieve(range(8), kind=CacheKind.QUERY)
    assert back is not None
    assert torch.equal(back, queries)


async def test_it_waits_for_coverage(ctx: MemoryKVCacheContext) -> None:
    waiting = asyncio.create_task(ctx.wait_for(range(8), timeout=60))
    await until_waiting(ctx.cache, 1)
    await ctx.put(kv_of(8), range(8))
    assert await waiting == 8


@pytest.mark.parametrize(
    ("kv", "tokens", "kind", "message"),
    [
        (kv_of(8), range(7), CacheKind.KV, r"\[2, 2, 7, 3\], not \[2, 2, 8, 3\]"),
        (kv_of(8)[:1], range(8), CacheKind.KV, r"\[2, 2, 8, 3\], not \[1, 2, 8, 3\]"),
        (kv_of(8)[:, :1], range(8), CacheKind.KV, r"not \[2, 1, 8, 3\]"),
        (kv_of(8)[..., :2], range(8), CacheKind.KV, r"not \[2, 2, 8, 2\]"),
        (kv_of(8)[0], range(8), CacheKind.KV, r"not \[2, 8, 3\]"),
        (kv_of(8), range(8), CacheKind.QUERY, r"\[1, 2, 8, 6\], not \[2, 2, 8, 3\]"),
        (kv_of(8).half(), range(8), CacheKind.KV, "torch.float32, not torch.float16"),
        ([1, 2], range(2), CacheKind.KV, "torch.Tensor, not list"),
        (kv_of(2), [1, -1], CacheKind.KV, "at least 0"),
        (kv_of(2), [1.0, 2.0], CacheKind.KV, "integer"),
        (kv_of(2), [[1, 2]], CacheKind.KV, "flat"),
        (kv_of(2), "ab", CacheKind.KV, "flat"),
        (kv_of(2), [1, 2**64], CacheKind.KV, "token"),
        (kv_of(2), [1, None], CacheKind.KV, "integer"),
        (kv_of(2), [[1], [2, 3]], CacheKind.KV, "flat"),
    ],
)
async def test_a_put_that_cannot_be_right_is_refused(
    ctx: MemoryKVCacheContext, kv: Any, tokens: Any, kind: CacheKind, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        await ctx.put(kv, tokens, kind=kind)


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129, None, 7])
async def test_a_salt_that_cannot_be_right_is_refused_everywhere(ctx: MemoryKVCacheContext, salt: Any) -> None:
    for call in (
        ctx.retrieve(range(4), salt),
        ctx.lookup(range(4), salt),
        ctx.put(kv_of(4), range(4), salt),
        ctx.wait_for(range(4), timeout=0, cache_salt=salt),
    ):
        with pytest.raises(UsageError, match="cache_salt"):
            await call
    assert await ctx.lookup(range(4), "x" * 128) == 0


async def test_a_long_prompt_is_hashed_off_the_loop(ctx: MemoryKVCacheContext, monkeypatch: Any) -> None:
    hashed_in: list[str] = []
    keys = ctx.cache._keys

    def spy(*args: Any) -> list[bytes]:
        hashed_in.append(threading.current_thread().name)
        return keys(*args)

    monkeypatch.setattr(ctx.cache, "_keys", spy)
    tokens = list(range(50_000))
    await ctx.lookup(tokens)
    await ctx.retrieve(tokens)
    await ctx.wait_for(tokens, timeout=0)
    await ctx.put(kv_of(len(tokens)), tokens)
    assert len(hashed_in) == 4
    assert all(name.startswith("lmcache-stream-transfer") for name in hashed_in)


async def test_a_copy_that_does_not_get_its_turn_times_out(cache: EmbeddedCache) -> None:
    executor = TransferExecutor(lanes=1, device="cpu")
    ctx = MemoryKVCacheContext(EmbeddedCache.open("memory://test"), "m", GEOMETRY, timeout=0.01, executor=executor)
    hold = threading.Event()
    busy = executor.submit(hold.wait, 30)
    with pytest.raises(CacheTimeout, match=r"0\.01 s"):
        await ctx.put(kv_of(4), range(4))
    with pytest.raises(CacheTimeout, match=r"0\.02 s"):
        await ctx.retrieve(range(4), timeout=0.02)
    hold.set()
    assert await asyncio.wrap_future(busy)
    assert await ctx.put(kv_of(4), range(4), timeout=60) == StoreOutcome(chunks=1, taken=1)
    await ctx.close()
    executor.close()


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", None])
async def test_a_time_that_cannot_be_is_refused(ctx: MemoryKVCacheContext, timeout: Any) -> None:
    with pytest.raises(UsageError, match="timeout must be a number of seconds"):
        await ctx.wait_for(range(4), timeout=timeout)
    if timeout is not None:
        with pytest.raises(UsageError, match="timeout must be a number of seconds"):
            await ctx.retrieve(range(4), timeout=timeout)


async def test_a_closed_context_refuses_everything(cache: EmbeddedCache) -> None:
    ctx = await open_context("memory://test", geometry=GEOMETRY)
    await ctx.close()
    await ctx.close()
    for call in (
        ctx.retrieve(range(4)),
        ctx.lookup(range(4)),
        ctx.put(kv_of(4), range(4)),
        ctx.wait_for(range(4), timeout=0),
        ctx.__aenter__(),
    ):
        with pytest.raises(UsageError, match="closed"):
            await call
    assert cache.put("m", range(4), [kv_of(4)]).taken == 1  # the second close took no reference


async def test_a_context_keeps_its_cache_alive() -> None:
    with opened("memory://kept?chunk_size=4") as cache:
        ctx = await open_context("memory://kept", model_name="m", geometry=GEOMETRY)
        cache.close()
        assert await ctx.store(kv_of(4), range(4))
        assert EmbeddedCache.open("memory://kept") is cache
        await ctx.close()


# --- which model --------------------------------------------------------------------------------------------------


async def test_the_only_model_needs_no_name(cache: EmbeddedCache) -> None:
    cache.register_model("only", GEOMETRY)
    async with await open_context("memory://test") as ctx:
        assert ctx.model_name == "only"
        assert ctx.geometry == cache.models()["only"]
        assert ctx.chunk_size == ctx.geometry.chunk_size == 4


async def test_several_models_need_a_name(cache: EmbeddedCache) -> None:
    cache.register_model("one", GEOMETRY)
    cache.register_model("two", GEOMETRY)
    with pytest.raises(UsageError, match="model_name, one of one, two"):
        await open_context("memory://test")
    async with await open_context("memory://test", model_name="two") as ctx:
        assert ctx.model_name == "two"


async def test_a_model_that_nobody_serves_is_refused_with_those_served(cache: EmbeddedCache) -> None:
    cache.register_model("one", GEOMETRY)
    with pytest.raises(UsageError, match=r"no engine serves 'three'.*one of one"):
        await open_context("memory://test", model_name="three")


async def test_without_an_engine_it_says_how_to_get_one() -> None:
    with pytest.raises(UsageError, match=r'EmbeddedEngine with cache="memory://alone".*geometry='):
        await open_context("memory://alone")
    assert not EmbeddedCache._by_name


async def test_a_given_geometry_does_without_an_engine(cache: EmbeddedCache) -> None:
    async with await open_context("memory://test", geometry=GEOMETRY) as ctx:
        assert ctx.geometry.chunk_size == 4


async def test_a_given_geometry_must_be_that_of_the_engine(cache: EmbeddedCache) -> None:
    cache.register_model("m", GEOMETRY)
    wider = KVGeometry(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM + 1)
    with pytest.raises(UsageError, match="head_dim is 3, not 4"):
        await open_context("memory://test", model_name="m", geometry=wider)
    with pytest.raises(UsageError, match="chunk_size=5"):
        await open_context("memory://test", geometry=KVGeometry(num_layers=2, num_kv_heads=1, head_dim=3, chunk_size=5))
    bare = KVGeometry(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, layer_types=("full_attention",) * 2)
    async with await open_context("memory://test", model_name="m", geometry=bare) as ctx:
        assert ctx.geometry.dtype == torch.float32
        assert ctx.geometry.layer_types == ("full_attention",) * 2
