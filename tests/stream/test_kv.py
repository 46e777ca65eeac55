from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

from lmcache_stream.editors.base import Edit, EditInput, Editor
from lmcache_stream.errors import (
    CacheError,
    CoverageTimeout,
    EditNotUsed,
    LMCacheStreamError,
    StoreError,
    UsageError,
)
from lmcache_stream.kvcache.context import StoreOutcome
from lmcache_stream.stream import AsyncLMCacheStream
from lmcache_stream.types import CacheKind, Completion, TokenEvent, Usage
from tests.engines import HEAD_DIM, HEADS, LAYERS, MODEL, AsyncCountingEngine, CountingEngine, kv_of
from tests.streams import PREFILL, Exchangeable, Setup, drop_every_other, keep, make_url, opened


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

    engine = Exchangeable(one.engine)
    stream = one.stream(18, engine)
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    engine.engine = evicting
    with pytest.raises(EditNotUsed) as caught:
        await stream.generate({"max_tokens": 2})
    assert (caught.value.stored, caught.value.used, caught.value.arrived) == (8, 0, 2)
    assert caught.value.suffix_consumed


@pytest.mark.parametrize("evicted", [False, True])
async def test_what_an_earlier_attempt_computed_does_not_pass_for_the_edit(one: Setup, evicted: bool) -> None:
    def asked_twice(ids: list[int], params: Mapping[str, Any], salt: str) -> Iterator[TokenEvent | Completion]:
        if evicted:
            one.cache.clear()
        list(CountingEngine.__call__(one.engine, ids, params, salt))  # nobody got its answer
        for item in CountingEngine.__call__(one.engine, ids, params, salt):
            yield msgspec.structs.replace(item, attempts=2) if isinstance(item, Completion) else item

    engine = Exchangeable(one.engine)
    stream = one.stream(18, engine)
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    engine.engine = asked_twice
    if evicted:
        with pytest.raises(EditNotUsed) as caught:
            await stream.generate({"max_tokens": 2})
        assert (caught.value.stored, caught.value.used, caught.value.arrived) == (8, 0, 2)
    else:
        await stream.generate({"max_tokens": 2})
        await stream.generate({"max_tokens": 2})


async def test_a_cache_that_fails_behind_an_answer_is_said_with_what_arrived(one: Setup) -> None:
    def asked_twice(ids: list[int], params: Mapping[str, Any], salt: str) -> Iterator[TokenEvent | Completion]:
        for item in CountingEngine.__call__(one.engine, ids, params, salt):
            yield msgspec.structs.replace(item, attempts=2) if isinstance(item, Completion) else item
        monkeypatch.setattr(one.ctx, "retrieve", broken)

    async def broken(*_: object, **__: object) -> torch.Tensor:
        raise CacheError("no cache")

    engine = Exchangeable(one.engine)
    stream = one.stream(18, engine)
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    engine.engine = asked_twice
    with pytest.MonkeyPatch.context() as monkeypatch:
        with pytest.raises(LMCacheStreamError, match="looking for the edit: no cache") as caught:
            await stream.generate({"max_tokens": 2})
        assert (caught.value.arrived, caught.value.suffix_consumed) == (2, True)
    engine.engine = one.engine
    await stream.generate({"max_tokens": 2})


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

    engine = Exchangeable(one.engine)
    stream = one.stream(18, engine)
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    engine.engine = partly
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

    engine = Exchangeable(one.engine)
    stream = one.stream(18, engine)
    await stream.generate(PREFILL)
    await stream.modify_kv(lambda kv, tokens: (-kv[:, :, ::2] - 1, tokens[::2]))
    engine.engine = evicting
    if ending == "left":
        async with aclosing(stream.events({"max_tokens": 2})) as events:
            await anext(events)
    elif ending == "failed":
        with pytest.raises(LMCacheStreamError, match="fell over"):
            await stream.generate({"max_tokens": 2})
    else:
        await stream.generate({"max_tokens": 2})
    assert await one.ctx.lookup(stream.tokens[:8], stream.cache_salt) == 8
    engine.engine = one.engine
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
    monkeypatch.setattr("lmcache_stream.stream.passes._warned", False)
    one.engine.usage = False
    for _ in range(2):
        stream = one.stream(18)
        await stream.generate(PREFILL)
        assert len(caplog.records) <= 1
        await stream.modify_kv(drop_every_other)
        await stream.generate({"max_tokens": 1})
    assert [record.getMessage() for record in caplog.records] == [
        "the engine, or post_completion, does not say how many prompt tokens came from the cache, so nothing shows at "
        "once that an edit was decoded from: start vLLM with --enable-prompt-tokens-details, and let post_completion "
        "end with a Completion that has its usage"
    ]


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
    with pytest.raises(CoverageTimeout, match="after 0 s the cache covers 8 of 16"):
        await stream.modify_kv(keep, timeout=0)
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


class AskingForQueries(Editor):
    """Keeps a half, and what it was given."""

    name = "asking"
    needs = frozenset({"queries"})
    seen: ClassVar[list[torch.Tensor | None]] = []

    def edit(self, x: EditInput) -> Edit:
        self.seen.append(x.queries)
        return Edit(kv=x.kv[:, :, ::2], tokens=x.tokens[::2], kept_positions=None)


@pytest.mark.parametrize("salt", ["", "tenant"])
async def test_an_editor_is_given_the_queries_it_needs(one: Setup, salt: str) -> None:
    stream = one.stream(18, cache_salt=salt)
    await stream.generate(PREFILL)
    queries = torch.randn(1, LAYERS, 16, 2 * HEADS * HEAD_DIM)
    await one.ctx.put(queries, range(16), salt, kind=CacheKind.QUERY)
    AskingForQueries.seen.clear()
    assert (await stream.modify_kv(AskingForQueries())).tokens_after == 8
    [seen] = AskingForQueries.seen
    assert seen is not None
    assert torch.equal(seen, queries)


async def test_an_editor_that_needs_queries_is_refused_before_anything_is_fetched(
    one: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def retrieve(*_: Any, **__: Any) -> None:
        raise AssertionError("it fetched")

    stream = one.stream(18)
    await stream.generate(PREFILL)
    monkeypatch.setattr(one.ctx, "retrieve", retrieve)
    with pytest.raises(UsageError, match=r"the cache holds none: serve with queries offloaded"):
        await stream.modify_kv(AskingForQueries())
    assert stream.cache_salt == ""


@pytest.mark.parametrize(
    ("call", "doing"), [("retrieve", "retrieving KV"), ("put", "storing the edit"), ("lookup", "looking up the edit")]
)
async def test_a_failure_of_the_cache_says_what_was_being_done(
    one: Setup, call: str, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: Any, **__: Any) -> None:
        raise CacheError("fell over")

    stream = one.stream(18)
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    monkeypatch.setattr(one.ctx, call, failing)
    with pytest.raises(LMCacheStreamError, match=f"stream {stream.stream_id()}: {doing}: fell over") as caught:
        await (stream.generate(PREFILL) if call == "lookup" else stream.modify_kv(drop_every_other))
    assert isinstance(caught.value.__cause__, CacheError)


async def test_a_shared_edit_of_which_one_chunk_was_evicted_is_noticed(one: Setup) -> None:
    stream = one.stream(18)
    await stream.generate(PREFILL)
    await stream.modify_kv(drop_every_other)
    kept = one.cache.longest_prefix(MODEL, stream.tokens, stream.cache_salt)
    await stream.fork()
    one.cache.clear()
    one.cache.put(MODEL, stream.tokens[:4], kept[:1], stream.cache_salt)
    with pytest.raises(EditNotUsed, match="4 of the edit's 8"):
        await stream.generate({"max_tokens": 2})


async def test_an_edit_left_as_it_was_by_an_editor_stores_nothing(one: Setup) -> None:
    class Keeping(Editor):
        name = "keeping"

        def edit(self, x: EditInput) -> Edit:
            return Edit(kv=x.kv, tokens=x.tokens, kept_positions=None)

    stream = one.stream(18)
    await stream.generate(PREFILL)
    receipt = await stream.modify_kv(Keeping())
    assert (receipt.stored, receipt.salt, receipt.tokens_before, receipt.tokens_after) == (False, "", 16, 16)
    assert receipt.bytes_moved == kv_of(list(range(16))).nbytes
    assert stream.last_receipt is receipt
    assert stream.tokens == [*range(18), 1000]


async def test_a_refused_store_says_why_and_what_to_do(one: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    async def put(*_: Any, **__: Any) -> StoreOutcome:
        return StoreOutcome(4, taken=1, kept=2, missing=1)

    stream = one.stream(32)
    await stream.generate(PREFILL)
    monkeypatch.setattr(one.ctx, "put", put)
    with pytest.raises(StoreError) as caught:
        await stream.modify_kv(drop_every_other)
    assert str(caught.value) == (
        f"stream {stream.stream_id()}: of 4 chunks of the edit, 2 are cached under these ids already and the cache "
        "keeps what it has (leave salt_edits on: an edit needs a cache_salt of its own), and for 1 it has no room "
        "(give it more, or edit fewer streams at once)"
    )


async def test_a_forgotten_prefill_is_named(one: Setup) -> None:
    stream = one.stream(18)
    with pytest.raises(CoverageTimeout, match="this stream has sent no request yet: await generate"):
        await stream.modify_kv(keep, timeout=0)
    one.engine.offload = False
    await stream.generate(PREFILL)
    with pytest.raises(CoverageTimeout, match="does the engine offload to this cache"):
        await stream.modify_kv(keep, timeout=0)


async def test_a_receipt_prints_without_its_positions(one: Setup) -> None:
    stream = one.stream(18)
    await stream.generate(PREFILL)
    receipt = await stream.modify_kv(drop_every_other)
    assert "tokens_after=8" in repr(receipt)
    assert "kept_positions" not in repr(receipt)


class Spending(Editor):
    """Negates values in memory of its own, and keeps whether its input was spent."""

    spent: ClassVar[list[bool]] = []

    def edit(self, x: EditInput) -> Edit:
        self.spent.append(x.spent)
        kv = x.kv.clone()
        kv[1].neg_()
        return Edit(kv=kv, tokens=x.tokens, kept_positions=None)


async def test_an_editor_that_keeps_the_ids_is_stored_and_told_of(one: Setup) -> None:
    stream = one.stream(18)
    await stream.generate(PREFILL)
    Spending.spent.clear()
    receipt = await stream.modify_kv(Spending())
    assert Spending.spent == [True]
    assert receipt.seconds.keys() == {"wait", "retrieve", "edit", "store"}
    assert receipt.salt == stream.cache_salt != ""
    assert (receipt.stored, receipt.chunks_stored, receipt.recomputed) == (True, 4, 0)
    assert type(receipt.chunks_stored) is type(receipt.bytes_moved) is int
    assert receipt.bytes_moved == 2 * kv_of(list(range(16))).nbytes


async def test_nothing_to_store_is_told_of_as_well(one: Setup) -> None:
    stream = one.stream(18, cache_salt="tenant")
    await stream.generate(PREFILL)
    receipt = await stream.modify_kv(lambda kv, tokens: None)
    assert receipt.seconds.keys() == {"wait", "retrieve", "edit"}
    assert (receipt.stored, receipt.salt, receipt.chunks_stored) == (False, "tenant", 0)
    assert receipt.bytes_moved == kv_of(list(range(16))).nbytes


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (3, r"fn must return \(new_kv, new_tokens\) or None, not int"),
        ((torch.zeros(2), ["a"]), r"new_tokens\[0\] is 'a', not a token id"),
        (([1], torch.zeros(2, 1, 1, 2)), r"must return \(new_kv, new_tokens\), in this order: KV came second"),
        ((np.zeros((2, 1, 1, 2)), [1]), r"KV must be a torch tensor \[2, L, T, D\], not numpy.ndarray$"),
        (([2.0], [1]), r"KV must be a torch tensor \[2, L, T, D\], not list$"),
        ((torch.zeros(2, 1, 2), [1]), r"KV must be a torch tensor \[2, L, T, D\], not one of shape \[2, 1, 2\]$"),
        ((torch.zeros(2), torch.tensor([1])), r"not one of shape \[2\]$"),
    ],
)
async def test_a_result_that_is_no_edit_is_named(one: Setup, result: Any, said: str) -> None:
    stream = one.stream(18)
    await stream.generate(PREFILL)
    with pytest.raises(UsageError, match=said):
        await stream.modify_kv(lambda kv, tokens: result)
