from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_stream import portal
from lmcache_stream.editors.base import Edit, EditInput, Editor
from lmcache_stream.errors import LMCacheStreamError, StreamTimeout, UsageError
from lmcache_stream.kvcache import connect
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.stream import AsyncLMCacheStream, LMCacheStream
from lmcache_stream.stream.kv import Coverage
from lmcache_stream.types import Completion, TokenEvent, Usage
from tests.engines import GEOMETRY, MODEL, AsyncCountingEngine, CountingEngine, kv_of
from tests.streams import CHUNK, PREFILL, Setup, drop_every_other, keep, make_url, opened

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


async def test_events_left_behind_that_do_not_close_are_a_timeout_that_says_so(
    one: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_stream.stream.asynchronous._RELEASE_TIMEOUT", 0.01)
    may_close = asyncio.Event()

    async def closes_late(_ids: object, _params: object, _salt: object, /) -> AsyncIterator[TokenEvent]:
        try:
            yield TokenEvent(7, "a")
            yield TokenEvent(8, "b")
        finally:
            await may_close.wait()

    stream = AsyncLMCacheStream(one.ctx, closes_late, range(10))
    async for _ in stream.events({"max_tokens": 2}):
        break
    with pytest.raises(StreamTimeout, match="left behind did not close"):
        await stream.fork()
    may_close.set()
    assert (await stream.fork()).output_tokens() == [7]


OPERATIONS: dict[str, Callable[[AsyncLMCacheStream], Awaitable[Any]]] = {
    "generate": lambda stream: stream.generate(PREFILL),
    "retrieve_kv": lambda stream: stream.retrieve_kv(),
    "modify_kv": lambda stream: stream.modify_kv(keep),
    "update_kv": lambda stream: stream.update_kv(kv_of(list(range(4))), range(4)),
    "fork": lambda stream: stream.fork(),
}


async def test_one_operation_at_a_time(one: Setup) -> None:
    stream = one.stream(10)
    async with aclosing(stream.events({"max_tokens": 30})) as events:
        await anext(events)
        for name, operation in OPERATIONS.items():
            with pytest.raises(UsageError, match=f"{name} while events is under way"):
                await operation(stream)
        await anext(events)
    assert len(one.engine.sent) == 1


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "fork"])
async def test_what_is_under_way_is_named(one: Setup, name: str) -> None:
    stream = one.stream(10)
    await stream.generate(PREFILL)
    running = asyncio.ensure_future(OPERATIONS[name](stream))
    await asyncio.sleep(0)
    with pytest.raises(UsageError, match=f"fork while {name} is under way"):
        await stream.fork()
    await running


async def test_options_and_their_defaults_reach_what_does_the_work(one: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = one.stream(10)
    asked: list[Any] = []

    async def retrieve(coverage: Coverage) -> torch.Tensor:
        asked.append(coverage)
        return kv_of([1])

    async def modify(_: Any, coverage: Coverage) -> None:
        asked.append(coverage)

    async def update(_kv: torch.Tensor, _tokens: list[int], *, timeout: float | None) -> None:
        asked.append(timeout)

    monkeypatch.setattr(stream._kv, "retrieve", retrieve)
    monkeypatch.setattr(stream._kv, "modify", modify)
    monkeypatch.setattr(stream._kv, "update", update)
    options: dict[str, Any] = {"timeout": 1, "poll_interval": 2, "allow_partial": True}
    await stream.retrieve_kv()
    await stream.retrieve_kv(**options)
    await stream.retrieve_kv(1, 2, decode_saved=True)
    await stream.modify_kv(keep)
    await stream.modify_kv(keep, **options)
    await stream.modify_kv(keep, timeout=1, poll_interval=2, decode_saved=True)
    covered = [Coverage(30, 0.2), Coverage(1, 2, allow_partial=True), Coverage(1, 2, decode_saved=True)]
    assert asked == covered * 2
    await stream.update_kv(kv_of([1]), [1])
    await stream.update_kv(kv_of([1]), [1], timeout=3)
    assert asked[-2:] == [None, 3]


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


async def test_a_fork_keeps_the_callers_salt_and_what_an_edit_left(one: Setup) -> None:
    stream = one.stream(18, cache_salt="mine")
    await stream.generate(PREFILL)
    await stream.modify_kv(lambda kv, _: (kv[:, :, :0], []))
    fork = await stream.fork()
    assert (fork.tokens, fork.suffix_tokens()) == ([], [16, 17, 1000])
    assert fork.cache_salt == stream.cache_salt
    await fork.generate({"max_tokens": 6})
    await fork.generate(PREFILL)
    await fork.modify_kv(drop_every_other)
    assert fork.cache_salt.startswith("mine~")
    assert fork.cache_salt != stream.cache_salt


async def test_only_a_shared_edit_is_read_back_before_a_request(one: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    retrieve = one.ctx.retrieve

    async def counting(tokens: list[int], *args: Any, **options: Any) -> Any:
        read.append(len(tokens))
        return await retrieve(tokens, *args, **options)

    monkeypatch.setattr(one.ctx, "retrieve", counting)
    stream = one.stream(18)
    await stream.generate(PREFILL)
    await stream.fork()
    await stream.modify_kv(drop_every_other)
    assert read == [19]
    await stream.generate(PREFILL)
    assert read == [19]
    await stream.fork()
    await stream.generate(PREFILL)
    assert read == [19, 8]


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


async def test_a_stream_tells_what_it_was_made_of(one: Setup) -> None:
    stream = one.stream([3, 4])
    assert (stream.ctx, stream.post_completion, stream.tokens) == (one.ctx, one.engine, [3, 4])
    assert uuid.UUID(stream.stream_id()).version == 4


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


async def test_a_stream_shows_what_it_knows(one: Setup) -> None:
    stream = one.stream(10)
    await stream.generate({"max_tokens": 2}, [50])
    assert repr(stream) == (f"AsyncLMCacheStream({stream.stream_id()}, tokens=13, suffix=0, decoded=2, done=False)")


async def test_arguments_of_the_wrong_kind_are_named(one: Setup) -> None:
    address: Any = "http://localhost:8000"
    with pytest.raises(TypeError, match=r"the second argument is a str: .* such as CompletionsClient\(base_url\)"):
        AsyncLMCacheStream(one.ctx, address, [1])
    lists: Any = [list(range(1, 100))]
    with pytest.raises(
        UsageError, match=r"prompt_token_ids\[0\] is \[1, 2, .*\.\.\.\], not a token id: take one list of"
    ):
        one.stream(lists)
