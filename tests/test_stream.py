from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_stream import portal
from lmcache_stream.editors.base import Edit, EditInput, Editor
from lmcache_stream.errors import (
    CoverageTimeout,
    EditNotUsed,
    LMCacheStreamError,
    StoreError,
    StreamTimeout,
    UsageError,
)
from lmcache_stream.kvcache import aconnect, connect
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.stream import AsyncLMCacheStream, LMCacheStream, create_request, generate, get, update
from lmcache_stream.types import Completion, TokenEvent, Usage

from .cancelling import cancelled_at_each_await
from .engines import GEOMETRY, MODEL, AsyncCountingEngine, CountingEngine, kv_of

CHUNK = 4
PREFILL: dict[str, Any] = {"max_tokens": 1}


class Setup:
    """A cache, a context on it, and an engine that offloads to it."""

    def __init__(self, cache: EmbeddedCache, ctx: Any, engine: CountingEngine) -> None:
        self.cache, self.ctx, self.engine = cache, ctx, engine

    def stream(self, prompt: int | list[int], **options: Any) -> AsyncLMCacheStream:
        ids = list(range(prompt)) if isinstance(prompt, int) else prompt
        return AsyncLMCacheStream(self.ctx, self.engine, ids, **options)


def make_url(chunk_size: int = CHUNK, max_bytes: str = "64MiB") -> str:
    return f"memory://{uuid.uuid4().hex}?chunk_size={chunk_size}&max_bytes={max_bytes}"


@pytest.fixture(params=[CountingEngine, AsyncCountingEngine])
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    async with opened(request.param) as made:
        yield made


@pytest.fixture
async def one() -> AsyncIterator[Setup]:
    async with opened(AsyncCountingEngine) as made:
        yield made


class opened:
    def __init__(self, engine: type[CountingEngine], url: str | None = None, **options: Any) -> None:
        self._engine, self._url, self._options = engine, url or make_url(), options

    async def __aenter__(self) -> Setup:
        self._cache = EmbeddedCache.open(self._url)
        self._cache.register_model(MODEL, GEOMETRY)
        self._ctx = await aconnect(self._url)
        return Setup(self._cache, self._ctx, self._engine(self._cache, **self._options))

    async def __aexit__(self, *_: object) -> None:
        await self._ctx.close()
        self._cache.unregister_model(MODEL)
        self._cache.close()


def drop_every_other(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv[:, :, ::2], tokens[::2]


def keep(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv, tokens


# The documented flow


async def test_prefill_modify_decode(setup: Setup) -> None:
    stream = setup.stream(18)
    metrics = await stream.generate(PREFILL)
    assert (metrics.input_tokens, metrics.output_tokens) == (18, 1)
    assert stream.tokens == [*range(18), 1000]

    receipt = await stream.modify_kv(drop_every_other)
    assert stream.tokens == list(range(0, 16, 2))
    assert stream.suffix_tokens() == [16, 17, 1000]
    assert (receipt.tokens_before, receipt.tokens_after, receipt.chunks_stored, receipt.recomputed) == (16, 8, 2, 0)
    assert receipt.bytes_moved == kv_of(list(range(24))).nbytes
    assert set(receipt.seconds) == {"wait", "retrieve", "edit", "store"}
    assert receipt.salt == stream.cache_salt != ""

    metrics = await stream.generate({"max_tokens": 3})
    ids, params, salt = setup.engine.sent[-1]
    assert ids == [*range(0, 16, 2), 16, 17, 1000]
    assert params == {"max_tokens": 3}
    assert salt == receipt.salt
    assert metrics.cached_tokens == 8
    assert metrics.edit_shortfall == 0
    assert stream.output_tokens() == [1000, 1001, 1002, 1003]
    assert stream.output_text() == "<1000><1001><1002><1003>"
    assert stream.decoded_tokens() == 4
    assert stream.suffix_tokens() == []
    assert len(metrics.tpot) == 2
    assert stream.last_metrics == metrics


async def test_the_stored_edit_is_what_the_editor_returned(one: Setup) -> None:
    stream = one.stream(16)
    await stream.generate(PREFILL)

    def negate(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        assert torch.equal(kv, kv_of(tokens))
        kv[1] = -kv[1] - 1
        return kv, tokens

    await stream.modify_kv(negate)
    kv = await stream.retrieve_kv()
    assert torch.equal(kv[0], kv_of(list(range(16)))[0])
    assert torch.equal(kv[1], -kv_of(list(range(16)))[1] - 1)
    original = await one.ctx.retrieve(list(range(16)))
    assert torch.equal(original, kv_of(list(range(16))))


async def test_an_edit_of_odd_length_leaves_its_rest_in_front_of_the_tail(one: Setup) -> None:
    stream = one.stream(18)
    await stream.generate(PREFILL)
    receipt = await stream.modify_kv(lambda kv, tokens: (kv[:, :, :7], tokens[:7]))
    assert stream.tokens == [0, 1, 2, 3]
    assert stream.suffix_tokens() == [4, 5, 6, 16, 17, 1000]
    assert (receipt.tokens_after, receipt.chunks_stored, receipt.recomputed) == (7, 1, 3)


@pytest.mark.parametrize("kept", [0, 1, 3])
async def test_an_edit_under_one_chunk_stores_nothing_and_loses_no_token(one: Setup, kept: int) -> None:
    stream = one.stream(16)
    await stream.generate(PREFILL)
    receipt = await stream.modify_kv(lambda kv, tokens: (kv[:, :, :kept], tokens[:kept]))
    assert (receipt.chunks_stored, receipt.recomputed) == (0, kept)
    await stream.generate(PREFILL)
    assert one.engine.sent[-1][0] == [*range(kept), 1000]


async def test_none_from_fn_changes_nothing(one: Setup) -> None:
    stream = one.stream(18)
    await stream.generate(PREFILL)
    before = (stream.tokens, stream.suffix_tokens(), stream.cache_salt)
    receipt = await stream.modify_kv(lambda kv, tokens: None)
    assert not receipt.stored
    assert (stream.tokens, stream.suffix_tokens(), stream.cache_salt) == before


async def test_fn_may_be_async(one: Setup) -> None:
    async def fn(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        await asyncio.sleep(0)
        return drop_every_other(kv, tokens)

    stream = one.stream(16)
    await stream.generate(PREFILL)
    assert (await stream.modify_kv(fn)).tokens_after == 8


async def test_a_sync_fn_never_runs_on_the_loop(one: Setup) -> None:
    threads: list[threading.Thread] = []

    def fn(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        threads.append(threading.current_thread())
        return kv, tokens

    stream = one.stream(16)
    await stream.generate(PREFILL)
    await stream.modify_kv(fn)
    assert threads[0] is not threading.current_thread()


async def test_an_editor_is_given_what_it_needs(one: Setup) -> None:
    seen: list[EditInput] = []

    class Halve(Editor):
        def edit(self, x: EditInput) -> Edit:
            seen.append(x)
            kept = torch.arange(0, len(x.tokens), 2)
            return Edit(kv=x.kv[:, :, kept], tokens=x.tokens[::2], kept_positions=kept, asked=0.5)

    stream = one.stream(16)
    await stream.generate(PREFILL)
    receipt = await stream.modify_kv(Halve())
    assert seen[0].tokens == tuple(range(16))
    assert seen[0].chunk_size == CHUNK
    assert seen[0].geometry is not None
    assert seen[0].geometry.num_layers == GEOMETRY.num_layers
    assert receipt.asked == 0.5
    assert receipt.kept_positions is not None
    assert receipt.kept_positions.tolist() == list(range(0, 16, 2))


async def test_update_kv_replaces_tokens_and_resets_done(setup: Setup) -> None:
    setup.engine.finish_reason = "stop"
    stream = setup.stream(18)
    await stream.generate(PREFILL)
    assert stream.is_done()
    kv = await stream.retrieve_kv()
    assert kv.shape == (2, 2, 16, 8)
    await stream.update_kv(kv[:, :, :8], list(range(8)))
    assert (stream.tokens, stream.suffix_tokens(), stream.done) == (list(range(8)), [], False)
    await stream.generate({"max_tokens": 2}, [77])
    assert setup.engine.sent[-1][0] == [*range(8), 77]


async def test_suffix_tokens_follow_the_pending_suffix(one: Setup) -> None:
    stream = one.stream(10)
    await stream.generate(PREFILL)
    await stream.modify_kv(keep)
    await stream.generate({"max_tokens": 2}, suffix_tokens=[5, 6])
    assert one.engine.sent[-1][0] == [*range(10), 1000, 5, 6]


# Salts, coverage, and edits that are not used


async def test_every_edit_gets_a_salt_of_its_own_from_the_callers(one: Setup) -> None:
    stream = one.stream(16, cache_salt="tenant")
    await stream.generate(PREFILL)
    assert one.engine.sent[-1][2] == "tenant"
    salts = []
    for _ in range(2):
        await stream.modify_kv(keep)
        salts.append(stream.cache_salt)
        await stream.generate(PREFILL)
        assert one.engine.sent[-1][2] == stream.cache_salt
    assert len(set(salts)) == 2
    assert all(salt.startswith("tenant~") and salt.count("~") == 1 for salt in salts)


async def test_without_a_salt_an_edit_that_keeps_its_ids_is_an_error_and_changes_nothing(one: Setup) -> None:
    stream = one.stream(16, salt_edits=False)
    await stream.generate(PREFILL)
    before = (stream.tokens, stream.suffix_tokens(), stream.cache_salt)
    with pytest.raises(StoreError, match="4 are cached under these ids already"):
        await stream.modify_kv(lambda kv, tokens: (-kv - 1, tokens))
    assert (stream.tokens, stream.suffix_tokens(), stream.cache_salt) == before


async def test_without_a_salt_an_edit_with_ids_of_its_own_is_stored(one: Setup) -> None:
    stream = one.stream(16, salt_edits=False)
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    assert stream.cache_salt == ""
    assert (await stream.generate(PREFILL)).cached_tokens == 8


async def test_no_room_is_an_error_and_changes_nothing() -> None:
    room = kv_of(list(range(16))).nbytes
    async with opened(CountingEngine, make_url(max_bytes=str(room))) as setup:
        stream = setup.stream(16)
        await stream.generate(PREFILL)
        before = (stream.tokens, stream.suffix_tokens(), stream.cache_salt)
        with pytest.raises(StoreError, match="no room"):
            await stream.modify_kv(lambda kv, tokens: (torch.cat([kv, kv], 2), [*tokens, *tokens]))
        assert (stream.tokens, stream.suffix_tokens(), stream.cache_salt) == before


async def test_an_evicted_edit_is_noticed_before_the_request(one: Setup) -> None:
    stream = one.stream(18)
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    one.cache.clear()
    requests = len(one.engine.sent)
    with pytest.raises(EditNotUsed, match="0 of the edit's 8") as caught:
        await stream.generate({"max_tokens": 2})
    assert (caught.value.stored, caught.value.used, caught.value.suffix_consumed) == (8, 0, False)
    assert len(one.engine.sent) == requests
    assert stream.suffix_tokens() == [16, 17, 1000]


async def test_an_edit_evicted_between_lookup_and_prefill_is_noticed(one: Setup) -> None:
    def evicting(ids: list[int], params: Mapping[str, Any], salt: str) -> Iterator[TokenEvent | Completion]:
        one.cache.clear()
        return CountingEngine.__call__(one.engine, ids, params, salt)

    stream = one.stream(18)
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    stream._post_completion = evicting
    with pytest.raises(EditNotUsed) as caught:
        await stream.generate({"max_tokens": 2})
    assert (caught.value.stored, caught.value.used, caught.value.arrived) == (8, 0, 2)
    assert caught.value.suffix_consumed


async def test_an_edit_of_which_one_chunk_was_evicted_is_noticed(one: Setup) -> None:
    stream = one.stream(18)
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    kept = one.cache.longest_prefix(MODEL, stream.tokens, stream.cache_salt)
    one.cache.clear()
    one.cache.put(MODEL, stream.tokens[:4], kept[:1], stream.cache_salt)
    with pytest.raises(EditNotUsed, match="4 of the edit's 8") as caught:
        await stream.generate({"max_tokens": 2})
    assert (caught.value.stored, caught.value.used) == (8, 4)


async def test_an_engine_that_takes_a_part_of_the_edit_is_noticed(one: Setup) -> None:
    def partly(ids: list[int], params: Mapping[str, Any], salt: str) -> Iterator[TokenEvent | Completion]:
        yield TokenEvent(5)
        yield Completion("length", usage=Usage(len(ids), 1, 4))

    stream = one.stream(18)
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    stream._post_completion = partly
    with pytest.raises(EditNotUsed) as caught:
        await stream.generate({"max_tokens": 1})
    assert (caught.value.stored, caught.value.used, caught.value.arrived) == (8, 4, 1)


@pytest.mark.parametrize("ending", ["left", "failed", "silent"])
async def test_an_edit_evicted_during_a_request_without_a_verdict_is_noticed_by_the_next(
    one: Setup, ending: str
) -> None:
    """The engine offloads what it computed itself under the edit's ids and salt: a lookup would find that."""

    async def evicting(ids: list[int], params: Mapping[str, Any], salt: str) -> AsyncIterator[TokenEvent | Completion]:
        one.cache.clear()
        one.engine.put(ids, salt)
        yield TokenEvent(5)
        if ending == "failed":
            raise RuntimeError("engine fell over")
        yield TokenEvent(6)

    stream = one.stream(18)
    await stream.generate(PREFILL)
    await stream.modify_kv(lambda kv, tokens: (-kv[:, :, ::2] - 1, tokens[::2]))
    stream._post_completion = evicting
    if ending == "left":
        async with aclosing(stream.events({"max_tokens": 2})) as events:
            await anext(events)
    elif ending == "failed":
        with pytest.raises(LMCacheStreamError, match="fell over"):
            await stream.generate({"max_tokens": 2})
    else:
        await stream.generate({"max_tokens": 2})
    assert await one.ctx.lookup(stream.tokens[:8], stream.cache_salt) == 8
    stream._post_completion = one.engine
    for _ in range(2):
        with pytest.raises(EditNotUsed, match="0 of the edit's 8"):
            await stream.generate({"max_tokens": 1})


async def test_an_edit_that_is_still_there_after_a_request_without_a_verdict_is_gone_on_with(one: Setup) -> None:
    stream = one.stream(18)
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    async with aclosing(stream.events({"max_tokens": 5})) as events:
        await anext(events)
    assert (await stream.generate({"max_tokens": 1})).cached_tokens == 8


async def test_a_lost_edit_stays_lost_until_the_next(one: Setup) -> None:
    stream = one.stream(18, on_shortfall="report")
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    one.cache.clear()
    for _ in range(2):
        assert (await stream.generate({"max_tokens": 1})).edit_shortfall == 8
    await stream.modify_kv(keep)
    assert (await stream.generate({"max_tokens": 1})).edit_shortfall == 0


async def test_an_engine_that_does_not_say_what_it_took_is_warned_of(
    one: Setup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_stream.stream._warned", False)
    one.engine.usage = False
    for _ in range(2):
        stream = one.stream(18)
        await stream.generate(PREFILL)
        assert len(caplog.records) <= 1
        await stream.modify_kv(drop_every_other)
        await stream.generate({"max_tokens": 1})
    assert len(caplog.records) == 1
    assert "--enable-prompt-tokens-details" in caplog.text


async def test_chunks_evicted_between_waiting_and_retrieving_are_waited_for_again(
    one: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = one.stream(16)
    await stream.generate(PREFILL)
    original = type(one.ctx).wait_for
    calls = 0

    async def evicting(ctx: Any, *args: Any, **kwargs: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            one.engine.put(list(range(16)), "")
        covered: int = await original(ctx, *args, **kwargs)
        if calls == 1:
            one.cache.clear()
            one.engine.put(list(range(8)), "")
        return covered

    monkeypatch.setattr(type(one.ctx), "wait_for", evicting)
    assert (await stream.modify_kv(keep)).tokens_before == 16
    assert calls == 2


async def test_a_post_completion_that_drops_its_salt_is_noticed(one: Setup) -> None:
    async def dropping(ids: list[int], params: Mapping[str, Any], salt: str) -> AsyncIterator[TokenEvent | Completion]:
        async for item in one.engine(ids, params, ""):  # type: ignore[attr-defined]
            yield item

    stream = AsyncLMCacheStream(one.ctx, dropping, list(range(18)))
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    with pytest.raises(EditNotUsed, match="without its cache_salt"):
        await stream.generate({"max_tokens": 2})
    assert stream.output_tokens() == [1000, 1001, 1002]


async def test_a_shortfall_can_be_reported_instead(one: Setup) -> None:
    stream = one.stream(18, on_shortfall="report")
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    one.cache.clear()
    assert (await stream.generate({"max_tokens": 2})).edit_shortfall == 8


async def test_an_edit_waits_until_the_whole_prompt_is_offloaded(one: Setup) -> None:
    one.engine.offload = False
    stream = one.stream(16)
    await stream.generate(PREFILL)
    one.engine.put(list(range(8)), "")
    task = asyncio.create_task(stream.modify_kv(drop_every_other))
    await asyncio.sleep(0)
    one.engine.put(list(range(16)), "")
    assert (await task).tokens_before == 16


async def test_a_timeout_says_what_was_seen_and_wanted(one: Setup) -> None:
    one.engine.offload = False
    stream = one.stream(18)
    await stream.generate(PREFILL)
    one.engine.put(list(range(8)), "")
    with pytest.raises(CoverageTimeout, match="covers 8 of 16") as caught:
        await stream.modify_kv(keep, timeout=0.01)
    assert (caught.value.seen, caught.value.wanted) == (8, 16)
    assert isinstance(caught.value, TimeoutError)
    receipt = await stream.modify_kv(keep, timeout=0, allow_partial=True)
    assert receipt.tokens_before == 8
    assert stream.suffix_tokens() == [*range(8, 18), 1000]


async def test_nothing_cached_is_a_timeout_even_for_a_part(one: Setup) -> None:
    one.engine.offload = False
    stream = one.stream(18)
    await stream.generate(PREFILL)
    with pytest.raises(CoverageTimeout, match="covers 0 of 16"):
        await stream.modify_kv(keep, timeout=0, allow_partial=True)


async def test_less_than_a_chunk_fails_at_once(one: Setup) -> None:
    stream = one.stream(3)
    await stream.generate(PREFILL)
    with pytest.raises(LMCacheStreamError, match="less than one chunk of 4"):
        await stream.retrieve_kv()


async def test_a_prompt_that_another_request_offloaded_needs_no_generate(one: Setup) -> None:
    one.engine.put(list(range(16)), "")
    stream = one.stream(16)
    assert (await stream.retrieve_kv(0)).shape[2] == 16


async def test_generated_tokens_are_waited_for_when_the_engine_saves_them(one: Setup) -> None:
    stream = one.stream(15)
    await stream.generate(PREFILL)
    assert (await stream.retrieve_kv(0)).shape[2] == 12
    with pytest.raises(CoverageTimeout, match="12 of 16"):
        await stream.retrieve_kv(0, decode_saved=True)
    one.engine.put(stream.tokens, "")
    assert (await stream.retrieve_kv(0, decode_saved=True)).shape[2] == 16


# Failures leave a stream that can be used again


async def test_a_failure_before_the_first_token_changes_nothing(setup: Setup) -> None:
    stream = setup.stream(10)
    await stream.generate(PREFILL)
    await stream.modify_kv(keep)
    before = (stream.tokens, stream.suffix_tokens(), stream.decoded_tokens())
    setup.engine.fail_after = 0
    with pytest.raises(LMCacheStreamError, match="engine fell over") as caught:
        await stream.generate({"max_tokens": 5}, [50])
    assert (caught.value.arrived, caught.value.suffix_consumed) == (0, False)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (stream.tokens, stream.suffix_tokens(), stream.decoded_tokens()) == before
    setup.engine.fail_after = None
    await stream.generate({"max_tokens": 1}, [50])
    assert setup.engine.sent[-1][0] == [*range(10), 1000, 50]


async def test_a_failure_mid_stream_keeps_what_arrived(setup: Setup) -> None:
    stream = setup.stream(10)
    setup.engine.fail_after = 3
    with pytest.raises(LMCacheStreamError) as caught:
        await stream.generate({"max_tokens": 5}, [50])
    assert (caught.value.arrived, caught.value.suffix_consumed) == (3, True)
    assert stream.tokens == [*range(10), 50, 1000, 1001, 1002]
    assert stream.output_tokens() == [1000, 1001, 1002]
    assert stream.last_metrics is not None
    assert stream.last_metrics.output_tokens == 3
    setup.engine.fail_after = None
    await stream.generate({"max_tokens": 1})
    assert setup.engine.sent[-1][0] == [*range(10), 50, 1000, 1001, 1002]


async def test_an_abort_before_the_first_token_changes_nothing(one: Setup) -> None:
    one.engine.output, one.engine.finish_reason = 0, "abort"
    stream = one.stream(10)
    with pytest.raises(LMCacheStreamError, match="abort") as caught:
        await stream.generate({"max_tokens": 2}, [50])
    assert (caught.value.arrived, caught.value.suffix_consumed) == (0, False)
    assert stream.tokens == list(range(10))


async def test_a_store_that_cannot_fit_evicts_nobody() -> None:
    async with opened(CountingEngine, make_url(max_bytes=str(kv_of(list(range(24))).nbytes))) as setup:
        stream = setup.stream(16)
        await stream.generate(PREFILL)
        with pytest.raises(StoreError, match="no room"):
            await stream.modify_kv(lambda kv, tokens: (torch.cat([kv, kv], 2), [*tokens, *tokens]))
        assert await setup.ctx.lookup(list(range(16))) == 16
        await stream.modify_kv(lambda kv, tokens: (kv[:, :, :8], tokens[:8]))


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_abort_is_an_error_that_keeps_what_arrived(one: Setup, reason: str) -> None:
    one.engine.finish_reason = reason
    stream = one.stream(10)
    with pytest.raises(LMCacheStreamError, match=reason) as caught:
        await stream.generate({"max_tokens": 2})
    assert caught.value.arrived == 2
    assert not stream.done
    assert stream.output_tokens() == [1000, 1001]


async def test_a_failing_editor_changes_nothing_and_its_exception_passes(setup: Setup) -> None:
    stream = setup.stream(18)
    await stream.generate(PREFILL)
    before = (stream.tokens, stream.suffix_tokens(), stream.cache_salt)

    def fail(kv: torch.Tensor, tokens: list[int]) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        await stream.modify_kv(fail)
    assert (stream.tokens, stream.suffix_tokens(), stream.cache_salt) == before
    await stream.modify_kv(keep)
    await stream.generate(PREFILL)
    assert setup.engine.sent[-1][0] == [*range(18), 1000]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (7, "must return"),
        ((kv_of([1, 2]), [1]), "does not fit 1 ids"),
        ((kv_of([1])[:1], [1]), "planes, layers and width"),
        ((kv_of([1])[:, :1], [1]), "planes, layers and width"),
        ((kv_of([1])[..., :3], [1]), "planes, layers and width"),
        ((kv_of([1]).double(), [1]), "dtype"),
        ((kv_of([1])[0], [1]), r"tensor \[2, L, T, D\]"),
        ((kv_of([1]), ["a"]), "token id"),
    ],
)
async def test_what_an_editor_must_not_return(one: Setup, result: Any, message: str) -> None:
    stream = one.stream(18)
    await stream.generate(PREFILL)
    before = (stream.tokens, stream.suffix_tokens(), stream.cache_salt)
    with pytest.raises(UsageError, match=message):
        await stream.modify_kv(lambda kv, tokens: result)
    assert (stream.tokens, stream.suffix_tokens(), stream.cache_salt) == before


async def test_a_timeout_keeps_what_arrived(one: Setup) -> None:
    async def stalling(ids: list[int], params: Mapping[str, Any], salt: str) -> AsyncIterator[TokenEvent | Completion]:
        yield TokenEvent(7, "x")
        await asyncio.Event().wait()

    stream = AsyncLMCacheStream(one.ctx, stalling, [1, 2])
    with pytest.raises(StreamTimeout, match="1 tokens arrived") as caught:
        await stream.generate({"max_tokens": 5}, timeout=0.05)
    assert (caught.value.arrived, caught.value.suffix_consumed) == (1, True)
    assert stream.tokens == [1, 2, 7]


async def test_a_timeout_error_of_the_engine_is_no_timeout_of_ours(one: Setup) -> None:
    def failing(ids: list[int], params: Mapping[str, Any], salt: str) -> Iterator[TokenEvent]:
        raise TimeoutError("theirs")

    stream = AsyncLMCacheStream(one.ctx, failing, [1, 2])
    with pytest.raises(LMCacheStreamError, match="theirs") as caught:
        await stream.generate({"max_tokens": 5})
    assert not isinstance(caught.value, StreamTimeout)


async def test_generate_cancelled_at_every_await_sends_each_token_once() -> None:
    async with opened(AsyncCountingEngine) as setup:
        stream = setup.stream(10)
        expected = list(range(10))
        cancelled = 0
        async for _, was_cancelled in cancelled_at_each_await(lambda: stream.generate({"max_tokens": 3}, [50])):
            cancelled += was_cancelled
            if len(setup.engine.sent) == 0:
                assert stream.tokens == expected
                continue
            sent, generated = setup.engine.sent[-1][0], stream.tokens[len(expected) + 1 :]
            assert sent == [*expected, 50]
            if stream.tokens != expected:
                assert stream.tokens == [*expected, 50, *generated]
                assert generated == setup.engine.generated[-1][: len(generated)]
            assert setup.engine.closed == len(setup.engine.sent)
            expected = stream.tokens
        assert cancelled > 3
        assert stream.output_tokens() == [token for token in stream.tokens[10:] if token != 50]


async def test_modify_kv_cancelled_at_every_await_is_all_or_nothing() -> None:
    async with opened(AsyncCountingEngine) as setup:
        stream = setup.stream(18)
        await stream.generate(PREFILL)
        whole = [*range(18), 1000]

        async def fn(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
            await asyncio.sleep(0)
            return kv, tokens

        cancelled = 0
        salt = stream.cache_salt
        async for _, was_cancelled in cancelled_at_each_await(lambda: stream.modify_kv(fn)):
            cancelled += was_cancelled
            assert stream.tokens + stream.suffix_tokens() == whole
            assert (stream.cache_salt == salt) is was_cancelled
            salt = stream.cache_salt
        assert cancelled >= 2
        await stream.generate(PREFILL)
        assert setup.engine.sent[-1][0] == whole


# events, fork, and one thing at a time


async def test_events_hand_out_every_token(setup: Setup) -> None:
    stream = setup.stream(10)
    events = [event async for event in stream.events({"max_tokens": 3})]
    assert [event.token_id for event in events] == [1000, 1001, 1002]
    assert stream.output_tokens() == [1000, 1001, 1002]
    assert stream.last_metrics is not None
    assert stream.last_metrics.output_tokens == 3


async def test_leaving_events_early_keeps_what_was_handed_out(setup: Setup) -> None:
    stream = setup.stream(10)
    async with aclosing(stream.events({"max_tokens": 30}, [50])) as events:
        async for event in events:
            if event.token_id == 1001:
                break
    assert stream.tokens == [*range(10), 50, 1000, 1001]
    assert stream.last_metrics is not None
    assert stream.last_metrics.output_tokens == 2
    await stream.generate({"max_tokens": 1})
    assert setup.engine.sent[-1][0] == [*range(10), 50, 1000, 1001]


async def test_events_left_by_a_break_alone_do_not_block_the_stream(setup: Setup) -> None:
    stream = setup.stream(10)
    async for _ in stream.events({"max_tokens": 30}):
        break
    await stream.generate({"max_tokens": 1})
    assert setup.engine.sent[-1][0] == [*range(10), 1000]


async def test_one_operation_at_a_time(one: Setup) -> None:
    stream = one.stream(10)
    async with aclosing(stream.events({"max_tokens": 30})) as events:
        await anext(events)
        for operation in (
            stream.generate(PREFILL),
            stream.retrieve_kv(),
            stream.modify_kv(keep),
            stream.update_kv(kv_of([1]), [1]),
            stream.fork(),
        ):
            with pytest.raises(UsageError, match="events is under way"):
                await operation
        await anext(events)
    assert len(one.engine.sent) == 1


async def test_a_fork_goes_its_own_way(one: Setup) -> None:
    stream = one.stream(18, cache_salt="mine")
    await stream.generate(PREFILL)
    fork = await stream.fork()
    assert fork.stream_id() != stream.stream_id()
    assert (fork.tokens, fork.output_tokens(), fork.cache_salt) == (stream.tokens, [1000], "mine")
    await fork.modify_kv(drop_every_other)
    await stream.modify_kv(keep)
    assert fork.cache_salt != stream.cache_salt
    await fork.generate({"max_tokens": 1})
    await stream.generate({"max_tokens": 1})
    assert one.engine.sent[-2][0] == [*range(0, 16, 2), 16, 17, 1000]
    assert one.engine.sent[-1][0] == [*range(18), 1000]


async def test_a_fork_keeps_the_options(one: Setup) -> None:
    stream = one.stream(18, salt_edits=False, on_shortfall="report")
    await stream.generate(PREFILL)
    fork = await stream.fork()
    await fork.modify_kv(drop_every_other)
    assert fork.cache_salt == ""
    one.cache.clear()
    assert (await fork.generate({"max_tokens": 1})).edit_shortfall == 8


async def test_the_callers_things_are_not_touched(one: Setup) -> None:
    prompt, params = list(range(10)), {"max_tokens": 2}
    stream = AsyncLMCacheStream(one.ctx, one.engine, prompt)
    await stream.generate(params)
    stream.tokens.append(5)
    stream.output_tokens().append(5)
    stream.suffix_tokens().append(5)
    assert (prompt, params) == (list(range(10)), {"max_tokens": 2})
    assert stream.tokens == [*range(10), 1000, 1001]


@pytest.mark.parametrize(
    ("params", "suffix"), [(None, ()), ({"max_tokens": 0}, ()), ({"max_tokens": "3"}, ()), ({}, ["x"]), ({}, [-1])]
)
async def test_arguments_that_cannot_be_right_are_refused_before_anything_is_sent(
    one: Setup, params: Any, suffix: Any
) -> None:
    stream = one.stream(10)
    with pytest.raises(UsageError):
        await stream.generate(params, suffix)
    assert one.engine.sent == []
    await stream.generate(PREFILL)


async def test_a_stream_needs_a_prompt_and_the_right_face(one: Setup) -> None:
    with pytest.raises(UsageError, match="empty"):
        one.stream([])
    with pytest.raises(TypeError, match="callable"):
        AsyncLMCacheStream(one.ctx, 7, [1])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="on_shortfall"):
        one.stream([1], on_shortfall="ignore")
    with pytest.raises(TypeError, match="AsyncLMCacheStream takes one from aconnect"):
        LMCacheStream(one.ctx, one.engine, [1])


async def test_an_engine_may_do_what_it_likes_with_what_it_is_given(one: Setup) -> None:
    def greedy(ids: list[int], params: Any, salt: str) -> Iterator[TokenEvent]:
        ids.clear()
        params.clear()
        yield TokenEvent(5)

    params = {"max_tokens": 1}
    stream = AsyncLMCacheStream(one.ctx, greedy, [1, 2])
    await stream.generate(params)
    assert (stream.tokens, params) == ([1, 2, 5], {"max_tokens": 1})


async def test_an_edit_to_nothing_leaves_nothing_to_send(one: Setup) -> None:
    stream = one.stream(16)
    await stream.generate(PREFILL)
    await stream.update_kv(kv_of([])[:, :, :0], [])
    with pytest.raises(UsageError, match="nothing to send"):
        await stream.generate(PREFILL)
    await stream.generate(PREFILL, [7])
    assert one.engine.sent[-1][0] == [7]


async def test_nonsense_after_the_first_token_keeps_what_arrived(one: Setup) -> None:
    def nonsense(ids: list[int], params: Any, salt: str) -> Iterator[Any]:
        yield TokenEvent(5)
        yield "x"

    stream = AsyncLMCacheStream(one.ctx, nonsense, [1, 2])
    with pytest.raises(LMCacheStreamError, match="must yield TokenEvent") as caught:
        await stream.generate({"max_tokens": 3})
    assert (caught.value.arrived, caught.value.suffix_consumed) == (1, True)


class Stopping(Editor):
    def edit(self, x: EditInput) -> Edit:
        return next(iter(()))


class Wrong(Editor):
    def edit(self, x: EditInput) -> Edit:
        return x.kv, x.tokens  # type: ignore[return-value]


class Asking(Editor):
    """Uses the cache while it edits."""

    ctx: Any = None

    def edit(self, x: EditInput) -> Edit:
        assert portal.run(Asking.ctx.retrieve, list(x.tokens)) is not None
        return Edit(kv=x.kv[:, :, ::2], tokens=x.tokens[::2], kept_positions=None)


async def test_editors_that_misbehave_leave_the_stream_as_it_was(one: Setup) -> None:
    stream = one.stream(16)
    await stream.generate(PREFILL)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await stream.modify_kv(Stopping())
    with pytest.raises(UsageError, match="must return an Edit"):
        await stream.modify_kv(Wrong())
    assert stream.tokens == [*range(16), 1000]
    await stream.modify_kv(keep)


def test_an_editor_may_use_the_cache() -> None:
    url = make_url()
    cache = EmbeddedCache.open(url)
    cache.register_model(MODEL, GEOMETRY)
    try:
        with connect(url) as ctx:
            Asking.ctx = ctx.async_context
            streams = [LMCacheStream(ctx, CountingEngine(cache), list(range(16))) for _ in range(4)]
            for stream in streams:
                stream.generate(PREFILL)
            with ThreadPoolExecutor(4) as threads:
                receipts = list(threads.map(lambda stream: stream.modify_kv(Asking(), timeout=5), streams))
            assert [receipt.tokens_after for receipt in receipts] == [8] * 4
    finally:
        cache.unregister_model(MODEL)
        cache.close()


async def test_a_salt_that_cannot_be_is_refused_at_once(one: Setup) -> None:
    for salt in ("a@b", "x" * 129):
        with pytest.raises(UsageError, match="cache_salt"):
            one.stream(18, cache_salt=salt)


async def test_yielding_something_else_is_refused(one: Setup) -> None:
    stream = AsyncLMCacheStream(one.ctx, lambda *_: [(1, "a")], [1])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="TokenEvent"):
        await stream.generate(PREFILL)


async def test_done_by_count_for_plain_callables(one: Setup) -> None:
    def plain(ids: list[int], params: Mapping[str, Any], salt: str) -> Iterator[TokenEvent]:
        yield TokenEvent(5)
        yield TokenEvent(6)

    stream = AsyncLMCacheStream(one.ctx, plain, [1])
    for max_tokens, done in ((3, True), (2, False), (None, False)):
        await stream.generate({"max_tokens": max_tokens} if max_tokens else {})
        assert stream.is_done() is done
        assert stream.finish_reason() is None


async def test_times_come_from_the_engine_client_where_it_gives_them(one: Setup) -> None:
    def timed(ids: list[int], params: Mapping[str, Any], salt: str) -> Iterator[TokenEvent | Completion]:
        import time

        now = time.perf_counter()
        yield TokenEvent(1, time=now)
        yield TokenEvent(2, time=now + 1)
        yield TokenEvent(3, time=now + 1)
        yield Completion("length", usage=Usage(1, 3))

    metrics = await AsyncLMCacheStream(one.ctx, timed, [1]).generate({"max_tokens": 3})
    assert metrics.tpot == pytest.approx([0.5, 0.5])


# Editing while decoding


@pytest.mark.parametrize(("every", "max_tokens"), [(1, 3), (4, 4), (4, 5), (4, 9), (5, 12), (20, 8)])
async def test_editing_while_decoding_is_passes_and_edits_in_turn(setup: Setup, every: int, max_tokens: int) -> None:
    stream, by_hand = setup.stream(18), setup.stream(18)
    metrics = await stream.generate({"max_tokens": max_tokens}, [70], edit_every=every, editor=drop_every_other)
    sent, setup.engine.sent, setup.engine.next_id = setup.engine.sent, [], 1000

    left, suffix = max_tokens, [70]
    while left > every:
        for size in (every - 1, 1):
            if size:
                await by_hand.generate({"max_tokens": size}, suffix)
                suffix = []
        await by_hand.modify_kv(drop_every_other)
        left -= every
    await by_hand.generate({"max_tokens": left}, suffix)

    assert [(ids, params) for ids, params, _ in sent] == [(ids, params) for ids, params, _ in setup.engine.sent]
    assert stream.output_tokens() == by_hand.output_tokens() == list(range(1000, 1000 + max_tokens))
    assert stream.tokens == by_hand.tokens
    assert metrics.output_tokens == max_tokens
    assert metrics.input_tokens == 19
    assert len(metrics.tpot) == max_tokens - 1
    assert (stream.last_receipt is None) is (max_tokens <= every)


async def test_a_token_budget_bounds_a_long_answer(one: Setup) -> None:
    def newest_eight(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        return kv[:, :, -8:], tokens[-8:]

    stream = one.stream(18)
    handed_out = [
        event.token_id async for event in stream.events({"max_tokens": 40}, edit_every=4, editor=newest_eight)
    ]
    assert handed_out == list(range(1000, 1040))
    assert max(len(ids) for ids, _, _ in one.engine.sent[4:]) <= 8 + 4 + 4
    assert stream.output_text() == "".join(f"<{token}>" for token in range(1000, 1040))


async def test_a_finished_stream_is_edited_no_more(one: Setup) -> None:
    one.engine.finish_reason = "stop"
    stream = one.stream(18)
    await stream.generate({"max_tokens": 40}, edit_every=8, editor=drop_every_other)
    assert stream.done
    assert len(one.engine.sent) == 1
    assert stream.last_receipt is None


async def test_a_failure_while_editing_keeps_what_arrived(one: Setup) -> None:
    def fail(kv: torch.Tensor, tokens: list[int]) -> Any:
        raise ZeroDivisionError("mine")

    stream = one.stream(18)
    with pytest.raises(ZeroDivisionError, match="mine"):
        await stream.generate({"max_tokens": 9}, [70], edit_every=4, editor=fail)
    assert stream.tokens == [*range(18), 70, 1000, 1001, 1002, 1003]

    def evict(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        one.engine.fail_after = 1
        return kv, tokens

    with pytest.raises(LMCacheStreamError) as caught:
        await stream.generate({"max_tokens": 9}, edit_every=4, editor=evict)
    assert (caught.value.arrived, caught.value.suffix_consumed) == (5, True)
    assert stream.output_tokens() == list(range(1000, 1009))


async def test_a_prompt_under_one_chunk_is_not_edited_before_it_fills_one(one: Setup) -> None:
    stream = one.stream(2)
    await stream.generate({"max_tokens": 5}, edit_every=1, editor=keep)
    assert [ids for ids, _, _ in one.engine.sent] == [[0, 1, *range(1000, 1000 + count)] for count in range(5)]


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({"edit_every": 4}, {"max_tokens": 8}),
        ({"editor": keep}, {"max_tokens": 8}),
        ({"edit_every": 0, "editor": keep}, {"max_tokens": 8}),
        ({"edit_every": 4, "editor": keep}, {}),
    ],
)
async def test_editing_while_decoding_needs_its_arguments(
    one: Setup, options: dict[str, Any], params: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="edit_every"):
        await one.stream(18).generate(params, **options)
    assert one.engine.sent == []


async def test_an_editor_that_keeps_everything_stores_nothing(one: Setup) -> None:
    class KeepAll(Editor):
        def edit(self, x: EditInput) -> Edit:
            return Edit(kv=x.kv, tokens=x.tokens, kept_positions=None)

    stream = one.stream(18, cache_salt="mine")
    await stream.generate(PREFILL)
    receipt = await stream.modify_kv(KeepAll())
    assert not receipt.stored
    assert stream.cache_salt == "mine"
    assert stream.last_receipt == receipt


# The suffix contract

STEPS = st.one_of(
    st.tuples(st.just("generate"), st.integers(1, 6), st.lists(st.integers(500, 509), max_size=3)),
    st.tuples(st.just("modify"), st.sampled_from(["keep", "half", "first", "prefix5", "none", "fail"])),
    st.tuples(st.just("fail"), st.integers(0, 3)),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=st.integers(1, 30), chunk=st.integers(1, 8), steps=st.lists(STEPS, max_size=6))
def test_ids_sent_are_kept_ids_tail_suffix_and_generated_each_once(
    prompt: int, chunk: int, steps: list[tuple[Any, ...]]
) -> None:
    asyncio.run(follow(prompt, chunk, steps))


async def follow(prompt: int, chunk: int, steps: list[tuple[Any, ...]]) -> None:
    """Run `steps` on a stream and on a plain list of ids, and compare what is sent."""
    async with opened(AsyncCountingEngine, make_url(chunk)) as setup:
        stream = setup.stream(prompt)
        model = list(range(prompt))
        offloaded = 0  # tokens of `model` whose KV the cache can hold
        output: list[int] = []
        covered_now = 0

        for step in [*steps, ("generate", 1, [])]:
            if step[0] == "generate":
                _, max_tokens, suffix = step
                setup.engine.fail_after = None
                await stream.generate({"max_tokens": max_tokens}, suffix)
                model += suffix
                assert setup.engine.sent[-1][0] == model
                offloaded = len(model)
                model += setup.engine.generated[-1]
                output += setup.engine.generated[-1]
            elif step[0] == "fail":
                setup.engine.fail_after = step[1]
                with pytest.raises(LMCacheStreamError):
                    await stream.generate({"max_tokens": 3}, [600])
                if step[1]:
                    model += [600, *setup.engine.generated[-1]]
                    output += setup.engine.generated[-1]
                    setup.engine.put(model[: -step[1]], stream.cache_salt)
                    offloaded = len(model) - step[1]
            else:
                if not offloaded // chunk:
                    continue
                edited: list[int] = []

                def fn(kv: torch.Tensor, tokens: list[int], how: str = step[1], seen: list[int] = edited) -> Any:
                    seen[:] = tokens
                    if how == "fail":
                        raise KeyError(how)
                    if how == "none":
                        return None
                    selection = {"keep": slice(None), "half": slice(None, None, 2), "first": slice(0, 1)}
                    chosen = selection.get(how, slice(0, 5))
                    return kv[:, :, chosen], tokens[chosen]

                try:
                    receipt = await stream.modify_kv(fn)
                except KeyError:
                    continue
                covered_now = receipt.tokens_before
                assert edited == model[:covered_now]
                assert covered_now >= offloaded // chunk * chunk
                if not receipt.stored:
                    continue
                selection = {"keep": slice(None), "half": slice(None, None, 2), "first": slice(0, 1)}
                kept = edited[selection.get(step[1], slice(0, 5))]
                model = kept + model[covered_now:]
                offloaded = receipt.chunks_stored * chunk
            assert stream.tokens + stream.suffix_tokens() == model
            assert stream.output_tokens() == output


# The sync face


def test_the_documented_sync_flow() -> None:
    url = make_url()
    cache = EmbeddedCache.open(url)
    cache.register_model(MODEL, GEOMETRY)
    ctx = connect(url)
    try:
        engine = CountingEngine(cache)
        stream = create_request(ctx, engine, list(range(18)))
        generate(stream, PREFILL)
        kv = get(stream, timeout=1, poll_interval=0.1)
        assert torch.equal(kv, kv_of(list(range(16))))
        receipt = stream.modify_kv(drop_every_other)
        assert receipt.tokens_after == 8
        generate(stream, {"max_tokens": 3}, suffix_tokens=[9])
        assert engine.sent[-1][0] == [*range(0, 16, 2), 16, 17, 1000, 9]
        update(stream, kv, list(range(16)))
        assert stream.tokens == list(range(16))
        assert [event.token_id for event in stream.events({"max_tokens": 2})] == [1004, 1005]
        fork = stream.fork()
        assert (fork.tokens, fork.ctx) == (stream.tokens, ctx)
        assert fork.stream_id() != stream.stream_id()
        assert stream.finish_reason() == "length"
        assert not stream.done
        with pytest.raises(TypeError, match="LMCacheStream takes one from connect"):
            AsyncLMCacheStream(ctx, engine, [1])  # type: ignore[arg-type]
    finally:
        ctx.close()
        cache.unregister_model(MODEL)
        cache.close()


def test_a_sync_fn_may_use_the_sync_face_itself() -> None:
    url = make_url()
    cache = EmbeddedCache.open(url)
    cache.register_model(MODEL, GEOMETRY)
    try:
        with connect(url) as ctx:
            stream = LMCacheStream(ctx, CountingEngine(cache), list(range(16)))
            stream.generate(PREFILL)

            def fn(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
                assert ctx.lookup(tokens) == 16
                return kv, tokens

            stream.modify_kv(fn)
    finally:
        cache.unregister_model(MODEL)
        cache.close()


def test_leaving_sync_events_early_keeps_what_arrived() -> None:
    url = make_url()
    cache = EmbeddedCache.open(url)
    cache.register_model(MODEL, GEOMETRY)
    try:
        with connect(url) as ctx:
            engine = CountingEngine(cache)
            stream = LMCacheStream(ctx, engine, list(range(10)))
            for event in stream.events({"max_tokens": 30}):
                assert event.token_id == 1000
                break
            arrived = stream.output_tokens()
            assert arrived == list(range(1000, 1000 + len(arrived)))
            stream.generate({"max_tokens": 1})
            assert engine.sent[-1][0] == [*range(10), *arrived]
    finally:
        cache.unregister_model(MODEL)
        cache.close()


@pytest.mark.parametrize("on_shortfall", ["raise", "report"])
async def test_what_took_the_place_of_a_lost_edit_is_not_edited(on_shortfall: Any) -> None:
    """A request that is left says nothing of the edit, and the engine offloads what it computed in its place."""

    class Evicting(AsyncCountingEngine):
        evicts = False

        async def __call__(self, ids: list[int], params: Mapping[str, Any], salt: str, /) -> AsyncIterator[Any]:  # type: ignore[override]
            if self.evicts:
                self.cache.clear()
                self.put(ids, salt)
            async for item in super().__call__(ids, params, salt):
                yield item

    async with opened(Evicting) as made:
        stream = AsyncLMCacheStream(made.ctx, made.engine, list(range(18)), on_shortfall=on_shortfall)
        await stream.generate({"max_tokens": 1})
        await stream.modify_kv(lambda kv, tokens: (-kv[:, :, ::2], tokens[::2]))
        assert isinstance(made.engine, Evicting)
        made.engine.evicts = True
        events = stream.events({"max_tokens": 5})
        await anext(events)
        await events.aclose()
        before = stream.tokens, stream.cache_salt
        if on_shortfall == "report":
            assert (await stream.modify_kv(lambda kv, tokens: (kv, tokens))).stored
            return
        for attempt in (lambda: stream.modify_kv(lambda kv, tokens: (kv, tokens)), stream.retrieve_kv):
            with pytest.raises(EditNotUsed, match="evicted"):
                await attempt()
        assert (stream.tokens, stream.cache_salt) == before
