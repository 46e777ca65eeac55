from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
import torch

from lmcache_stream.batch import AsyncBatchedStream
from lmcache_stream.editors.base import Edit, EditInput, Editor
from lmcache_stream.errors import (
    EngineResponseError,
    LMCacheStreamError,
    StoreError,
    StreamTimeout,
    UsageError,
)
from lmcache_stream.stream import AsyncLMCacheStream
from lmcache_stream.types import Completion, TokenEvent
from tests.cancelling import cancelled_at_each_await
from tests.engines import AsyncCountingEngine, CountingEngine, kv_of
from tests.streams import PREFILL, Setup, drop_every_other, keep, make_url, opened

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


@pytest.mark.parametrize(
    ("status", "what"),
    [(400, "the engine refused the request: HTTP 400: no"), (500, "the engine failed after 0 tokens")],
)
async def test_a_refused_request_is_no_failed_engine(one: Setup, status: int, what: str) -> None:
    async def refuses(*_: Any) -> AsyncIterator[TokenEvent]:
        if status:
            raise EngineResponseError("no", status=status)
        yield TokenEvent(1, "")

    with pytest.raises(LMCacheStreamError, match=what):
        await AsyncLMCacheStream(one.ctx, refuses, [1]).generate(PREFILL)


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


async def test_a_failure_without_words_is_named(one: Setup) -> None:
    def falls(_ids: list[int], _params: Any, _salt: str) -> Iterator[TokenEvent]:
        yield TokenEvent(5)
        raise ConnectionResetError

    with pytest.raises(LMCacheStreamError, match=r"failed after 1 tokens: ConnectionResetError\(\)$"):
        await one.stream(2, falls).generate({"max_tokens": 3})


async def test_an_edit_that_the_cache_refuses_midway_says_what_arrived(one: Setup) -> None:
    stream = one.stream(18, salt_edits=False)
    with pytest.raises(StoreError, match="keeps what it has") as caught:
        await stream.generate({"max_tokens": 9}, [70], edit_every=4, editor=lambda kv, tokens: (kv + 1, tokens))
    assert (caught.value.arrived, caught.value.suffix_consumed) == (4, True)
    assert stream.tokens == [*range(18), 70, 1000, 1001, 1002, 1003]


async def test_a_callers_mistake_after_the_first_token_keeps_what_arrived(one: Setup) -> None:
    def mistaken(_ids: list[int], _params: Any, _salt: str) -> Iterator[TokenEvent]:
        yield TokenEvent(5)
        raise UsageError("mine")

    stream = one.stream(2, mistaken)
    with pytest.raises(LMCacheStreamError, match="failed after 1 tokens: mine") as caught:
        await stream.generate({"max_tokens": 3})
    assert isinstance(caught.value.__cause__, UsageError)
    assert (caught.value.arrived, caught.value.suffix_consumed) == (1, True)


async def test_nonsense_at_the_start_of_a_later_pass_keeps_what_arrived(one: Setup) -> None:
    sent: list[list[int]] = []

    def mistaken(ids: list[int], params: Any, _salt: str) -> Iterator[Any]:
        sent.append(ids)
        yield from [TokenEvent(5)] * params["max_tokens"] if len(sent) == 1 else ["x"]

    stream = one.stream(2, mistaken)
    with pytest.raises(LMCacheStreamError, match="must yield TokenEvent") as caught:
        await stream.generate({"max_tokens": 9}, [70], edit_every=4, editor=keep)
    assert (caught.value.arrived, caught.value.suffix_consumed) == (3, True)
    assert stream.tokens == [0, 1, 70, 5, 5, 5]


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


class NeedsQueries(Editor):
    needs = frozenset({"queries"})

    def edit(self, x: EditInput) -> Edit:
        raise AssertionError


async def test_an_edit_that_cannot_be_midway_says_what_arrived(one: Setup) -> None:
    stream = one.stream(18)
    with pytest.raises(LMCacheStreamError, match=r"an edit midway: .*queries") as caught:
        await stream.generate({"max_tokens": 9}, [70], edit_every=4, editor=NeedsQueries())
    assert isinstance(caught.value.__cause__, UsageError)
    assert (caught.value.arrived, caught.value.suffix_consumed) == (4, True)
    assert stream.tokens == [*range(18), 70, 1000, 1001, 1002, 1003]


@pytest.mark.parametrize("fn", [NeedsQueries, "drop", None, 0.5])
async def test_what_is_no_edit_is_refused_before_anything_runs(one: Setup, fn: Any) -> None:
    stream = one.stream(18)
    with pytest.raises(UsageError, match=r"an edit is an Editor, such as StreamingLLM\(keep=0.5\), or a function"):
        await stream.modify_kv(fn, timeout=30)
    if fn is not None:
        with pytest.raises(UsageError, match="an edit is an Editor"):
            await stream.generate({"max_tokens": 9}, edit_every=4, editor=fn)
    batch = AsyncBatchedStream(progress=False)
    batch.add(stream)
    with pytest.raises(UsageError, match="an edit is an Editor"):
        await batch.modify(fn)
    assert one.engine.sent == []


async def test_passes_of_their_own_length_do_not_go_with_a_shortest_answer(one: Setup) -> None:
    with pytest.raises(UsageError, match="min_tokens does not go with edit_every"):
        await one.stream(18).generate({"max_tokens": 9, "min_tokens": 9}, edit_every=4, editor=keep)
    assert one.engine.sent == []


class InPlace(Editor):
    def edit(self, x: EditInput) -> Edit:
        x.kv[1].neg_()
        return Edit(kv=x.kv, tokens=x.tokens, kept_positions=None)


async def test_an_editor_that_writes_into_its_input_is_stored(one: Setup) -> None:
    stream = one.stream(16)
    await stream.generate(PREFILL)
    receipt = await stream.modify_kv(InPlace())
    assert (receipt.stored, receipt.chunks_stored) == (True, 4)
    expected = kv_of(list(range(16)))
    expected[1].neg_()
    assert torch.equal(await stream.retrieve_kv(), expected)


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
