from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.errors import UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.types import CacheKind

from .embedded import GEOMETRY, HEAD_DIM, HEADS, TOKEN_BYTES, chunks_of, kv_of, opened, until_waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

# --- one cache a name ---------------------------------------------------------------------------------------------


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
