"""Streams against a plain model of their specification, with failures, evictions and cancellations as steps.

More examples than the few of a check: `LMCACHE_STREAM_MACHINE_EXAMPLES=2000`.
"""

from __future__ import annotations

import asyncio
import copy
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_stream.errors import CoverageTimeout, EditNotUsed, LMCacheStreamError, UsageError
from lmcache_stream.kvcache import AsyncKVCacheContext, aconnect
from lmcache_stream.kvcache.memory import EmbeddedCache
from lmcache_stream.stream import AsyncLMCacheStream
from lmcache_stream.types import Completion, TokenEvent, Usage
from tests.cancelling import WatchedRun, tasks_watched
from tests.engines import GEOMETRY, MODEL, kv_of

EXAMPLES = int(os.environ.get("LMCACHE_STREAM_MACHINE_EXAMPLES", "30"))
STREAMS = 3


@dataclass(frozen=True)
class Plan:
    """What the engine does with the next request.

    Args:
        tokens: How many it generates; None: `max_tokens`.
        fails_after: Tokens after which it falls over.
        finish_reason: What it says at the end.
        says_usage: Whether it says what it took from the cache.
        offloads: Whether it offloads the prompt.
        evicts: Whether everything is evicted before it begins.
    """

    tokens: int | None = None
    fails_after: int | None = None
    finish_reason: str | None = "length"
    says_usage: bool = True
    offloads: bool = True
    evicts: bool = False


WELL = Plan()
PLANS = st.sampled_from(
    [
        WELL,
        Plan(tokens=0, finish_reason="stop"),
        Plan(tokens=2, finish_reason="repetition"),
        Plan(tokens=0, finish_reason="error"),
        Plan(tokens=2, finish_reason="abort"),
        Plan(fails_after=0),
        Plan(fails_after=2),
        Plan(finish_reason=None, says_usage=False),
        Plan(tokens=1, finish_reason=None, says_usage=False),
        Plan(offloads=False),
        Plan(evicts=True),
        Plan(evicts=True, says_usage=False),
        Plan(evicts=True, says_usage=False, offloads=False),
    ]
)


class Engine:
    """Does what it is told, over the embedded cache."""

    def __init__(self, cache: EmbeddedCache) -> None:
        self.cache = cache
        self.plan = WELL
        self.sent: list[tuple[list[int], str]] = []
        self.generated: list[int] = []
        self.open = 0
        self._next = 1000

    async def __call__(
        self, ids: list[int], params: Mapping[str, Any], salt: str, /
    ) -> AsyncIterator[TokenEvent | Completion]:
        plan = self.plan
        self.open += 1
        try:
            if plan.evicts:
                self.cache.clear()
            cached = min(self.cache.covered(MODEL, ids, salt), len(ids) - 1)
            self.sent.append((list(ids), salt))
            self.generated = []
            for index in range(params["max_tokens"] if plan.tokens is None else plan.tokens):
                await asyncio.sleep(0)
                if index == plan.fails_after:
                    raise RuntimeError("fell over")
                self._next += 1
                self.generated.append(self._next)
                yield TokenEvent(self._next, f"<{self._next}>")
            if plan.fails_after is not None:
                raise RuntimeError("fell over")
            if plan.offloads:
                self.offload(ids, salt)
            if plan.says_usage or plan.finish_reason:
                usage = Usage(len(ids), len(self.generated), cached) if plan.says_usage else None
                yield Completion(plan.finish_reason, None, usage)
        finally:
            self.open -= 1

    def offload(self, ids: list[int], salt: str) -> None:
        size = self.cache.chunk_size
        whole = len(ids) // size * size
        kv = kv_of(ids[:whole])
        self.cache.put(MODEL, ids[:whole], [kv[:, :, at : at + size].clone() for at in range(0, whole, size)], salt)


@dataclass
class Model:
    """What a stream is by its specification."""

    tokens: list[int]
    salt: str
    suffix: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    expected: int = 0
    edit: torch.Tensor | None = None  # what was stored for the first ids of `tokens`
    lost: bool = False
    done: bool = False
    finish_reason: str | None = None

    @property
    def stored(self) -> int:
        return 0 if self.edit is None else self.edit.shape[2]

    def took(self, ids: list[int], arrived: list[int]) -> None:
        """`ids` were sent, and these tokens came."""
        self.tokens = [*ids, *arrived]
        self.suffix = []
        self.output += arrived
        self.expected = len(ids)
        self.done, self.finish_reason = False, None

    def edited(self, kv: torch.Tensor, ids: list[int], chunk: int, tail: list[int], salt: str) -> None:
        """`ids` with `kv` were stored in place of what came before `tail`."""
        whole = len(ids) // chunk * chunk
        self.suffix = [*ids[whole:], *tail, *self.suffix]
        self.tokens = ids[:whole]
        self.edit = kv[:, :, :whole].clone() if whole else None
        self.salt, self.expected = salt, whole
        self.lost = self.done = False
        self.finish_reason = None


@dataclass
class Pair:
    """A stream and its model."""

    stream: AsyncLMCacheStream
    model: Model


EDITS: dict[str, Callable[[torch.Tensor, list[int]], Any]] = {
    "everything": lambda kv, ids: (kv, ids),
    "every other": lambda kv, ids: (kv[:, :, ::2], ids[::2]),
    "five": lambda kv, ids: (kv[:, :, :5], ids[:5]),
    "one": lambda kv, ids: (kv[:, :, :1], ids[:1]),
    "nothing": lambda kv, ids: (kv[:, :, :0], []),
    "twice": lambda kv, ids: (torch.cat([kv, kv], 2), [*ids, *ids]),
    "in place": lambda kv, ids: (kv.mul_(-1), ids),
    "none": lambda kv, ids: None,
}
WRONG: dict[str, tuple[Callable[[torch.Tensor, list[int]], Any], type[Exception]]] = {
    "fails": (lambda kv, ids: 1 // 0, ZeroDivisionError),
    "wrong length": (lambda kv, ids: (kv, ids[:-1]), UsageError),
    "wrong shape": (lambda kv, ids: (kv[:1], ids), UsageError),
    "no pair": (lambda kv, ids: 7, UsageError),
}
SUFFIXES = st.lists(st.integers(500, 509), max_size=3)
WHICH = st.integers(0, STREAMS - 1)
POINTS = st.integers(0, 40)


class StreamMachine(RuleBasedStateMachine):
    """Up to three streams on one cache; forks may share an edit."""

    @initialize(prompt=st.integers(1, 26), chunk=st.integers(1, 6), salt=st.sampled_from(["", "tenant"]))
    def begin(self, prompt: int, chunk: int, salt: str) -> None:
        self.runner = asyncio.Runner()
        self.chunk, self.salt = chunk, salt
        self.cache = EmbeddedCache.open(f"memory://{uuid.uuid4().hex}?chunk_size={chunk}&max_bytes=64MiB")
        self.cache.register_model(MODEL, GEOMETRY)
        self.ctx: AsyncKVCacheContext = self.runner.run(self.connect())
        self.engine = Engine(self.cache)
        ids = list(range(prompt))
        stream = AsyncLMCacheStream(self.ctx, self.engine, ids, salt)
        self.pairs = [Pair(stream, Model(ids, salt, expected=prompt))]
        self.salts = {salt}

    def teardown(self) -> None:
        if hasattr(self, "ctx"):
            self.runner.run(self.ctx.close())
            self.cache.unregister_model(MODEL)
            self.cache.close()
            self.runner.close()

    async def connect(self) -> AsyncKVCacheContext:
        return await aconnect(f"memory://{self.cache.name}")

    def pair(self, which: int) -> Pair:
        return self.pairs[which % len(self.pairs)]

    def run(self, call: Callable[[], Awaitable[Any]], cancel_at: int | None = None) -> bool:
        """Run it, perhaps cancelled at one of its points; whether it was."""

        async def body() -> bool:
            with tasks_watched():
                return await WatchedRun(cancel_at)(call)

        return self.runner.run(body())

    # What the cache is known to hold.

    def intact(self, model: Model) -> bool:
        """Whether the cache still holds the very KV that was stored."""
        if model.edit is None:
            return True
        found = self.cache.longest_prefix(MODEL, model.tokens[: model.stored], model.salt)
        return len(found) * self.chunk == model.stored and torch.equal(torch.cat(found, 2), model.edit)

    def covered(self, model: Model) -> int:
        return self.cache.covered(MODEL, model.tokens, model.salt)

    # Steps.

    @rule(which=WHICH, plan=PLANS, max_tokens=st.integers(1, 5), suffix=SUFFIXES, leave=st.none() | st.integers(0, 4))
    def generate(self, which: int, plan: Plan, max_tokens: int, suffix: list[int], leave: int | None) -> None:
        """One pass, whole or left after some events."""
        pair = self.pair(which)
        stream, model = pair.stream, pair.model
        ids = [*model.tokens, *model.suffix, *suffix]
        sent, self.engine.plan = len(self.engine.sent), plan

        async def call() -> None:
            if leave is None:
                await stream.generate({"max_tokens": max_tokens}, suffix)
                return
            async with aclosing(stream.events({"max_tokens": max_tokens}, suffix)) as events:
                left = leave
                async for _ in events:
                    left -= 1
                    if left <= 0:
                        break

        if not ids:
            with pytest.raises(UsageError, match="nothing to send"):
                self.run(call)
            return
        if model.lost or not self.intact(model):
            model.lost = True
            with pytest.raises(EditNotUsed) as refused:
                self.run(call)
            assert not refused.value.suffix_consumed
            assert len(self.engine.sent) == sent
            return
        error: LMCacheStreamError | None = None
        try:
            self.run(call)
        except LMCacheStreamError as caught:
            error = caught
        assert self.engine.sent[sent:] == [(ids, model.salt)]
        count = max_tokens if plan.tokens is None else plan.tokens
        if plan.fails_after is not None:
            count = min(count, plan.fails_after)
        if leave is not None and count and max(leave, 1) <= count:
            model.took(ids, self.engine.generated[: max(leave, 1)])
            assert error is None
            return
        arrived = self.engine.generated
        assert len(arrived) == count
        given_up = plan.fails_after is not None or plan.finish_reason in ("abort", "error")
        if count or not given_up:
            model.took(ids, arrived)
        if given_up:
            assert error is not None
            assert (error.arrived, error.suffix_consumed) == (count, count > 0)
            if plan.fails_after is None and count:
                model.finish_reason = plan.finish_reason
            return
        model.finish_reason = plan.finish_reason
        model.done = count < max_tokens if plan.finish_reason is None else plan.finish_reason != "length"
        if plan.evicts and plan.says_usage and min(model.stored, len(ids) - 1) > 0:
            model.lost = True
            assert isinstance(error, EditNotUsed)
            assert (error.used, error.suffix_consumed) == (model.stored - min(model.stored, len(ids) - 1), True)
        else:
            assert error is None

    @rule(which=WHICH, at=POINTS, max_tokens=st.integers(1, 4), suffix=SUFFIXES)
    def generate_cancelled(self, which: int, at: int, max_tokens: int, suffix: list[int]) -> None:
        """One pass, cancelled at a point, if it has that many."""
        pair = self.pair(which)
        stream, model = pair.stream, pair.model
        ids = [*model.tokens, *model.suffix, *suffix]
        if not ids or model.lost or not self.intact(model):
            return
        self.engine.plan = WELL
        had = stream.decoded_tokens()
        cancelled = self.run(lambda: stream.generate({"max_tokens": max_tokens}, suffix), at)
        arrived = stream.decoded_tokens() - had
        assert cancelled or arrived == max_tokens
        if arrived:
            assert self.engine.sent[-1] == (ids, model.salt)
            model.took(ids, self.engine.generated[:arrived])
            model.finish_reason = None if cancelled else "length"

    @rule(which=WHICH, every=st.integers(1, 3), max_tokens=st.integers(1, 7))
    def generate_with_edits(self, which: int, every: int, max_tokens: int) -> None:
        """Editing while decoding: passes and edits in turn."""
        pair = self.pair(which)
        stream, model = pair.stream, pair.model
        if not [*model.tokens, *model.suffix] or model.lost or not self.intact(model):
            return
        self.engine.plan, sent = WELL, len(self.engine.sent)
        before = copy.deepcopy(model)
        edits = EDITS["every other"]
        self.run(lambda: stream.generate({"max_tokens": max_tokens}, edit_every=every, editor=edits))
        requests, output = self.engine.sent[sent:], stream.output_tokens()[len(before.output) :]
        assert len(output) == max_tokens
        while max_tokens:
            sizes = [size for size in (every - 1, 1) if size] if max_tokens > every else [max_tokens]
            for size in sizes:
                (ids, salt), arrived = requests.pop(0), output[:size]
                assert ids == [*model.tokens, *model.suffix]
                assert salt == model.salt or (model.salt == "?" and self.is_fresh(salt))
                model.salt, output = salt, output[size:]
                model.took(ids, arrived)
            model.finish_reason = "length"
            edited = max_tokens > every and model.expected >= self.chunk
            max_tokens -= sum(sizes)
            if edited:
                covered = model.expected // self.chunk * self.chunk
                kv, kept = edits(kv_of(model.tokens[:covered]), model.tokens[:covered])
                model.edited(kv, kept, self.chunk, model.tokens[covered:], "?")
        assert not requests
        if model.edit is not None and model.salt != before.salt:
            found = self.cache.longest_prefix(MODEL, model.tokens[: model.stored], model.salt)
            model.edit = torch.cat(found, 2)

    @rule(
        which=WHICH,
        how=st.sampled_from([*EDITS, *WRONG]),
        asynchronous=st.booleans(),
        part=st.booleans(),
        at=st.none() | POINTS,
    )
    def modify(self, which: int, how: str, asynchronous: bool, part: bool, at: int | None) -> None:
        """An edit, perhaps cancelled at a point: all or nothing."""
        pair = self.pair(which)
        stream, model = pair.stream, pair.model
        seen: list[list[int]] = []
        result: list[Any] = []

        def fn(kv: torch.Tensor, ids: list[int]) -> Any:
            found = self.cache.longest_prefix(MODEL, ids, model.salt)
            assert torch.equal(kv, torch.cat(found, 2))
            seen.append(list(ids))
            made = (EDITS[how] if how in EDITS else WRONG[how][0])(kv, ids)
            result[:] = [(made[0].clone(), list(made[1])) if how in EDITS and made is not None else None]
            return made

        async def slow(kv: torch.Tensor, ids: list[int]) -> Any:
            await asyncio.sleep(0)
            return fn(kv, ids)

        def call() -> Awaitable[Any]:
            return stream.modify_kv(slow if asynchronous else fn, timeout=0, allow_partial=part)

        if not self.can_retrieve(model, call, part=part):
            return
        covered = self.covered(model)
        if how in WRONG:
            with pytest.raises(WRONG[how][1]):
                self.run(call)
            return  # nothing changed
        if self.run(call, at):
            return  # nothing changed
        assert seen == [model.tokens[:covered]]
        receipt = stream.last_receipt
        assert receipt is not None
        assert receipt.tokens_before == covered
        if result[0] is None:
            assert not receipt.stored
            return
        kv, kept = result[0]
        whole = len(kept) // self.chunk * self.chunk
        assert (receipt.tokens_after, receipt.chunks_stored * self.chunk) == (len(kept), whole)
        assert receipt.recomputed == len(kept) - whole
        assert self.is_fresh(stream.cache_salt)
        model.edited(kv, kept, self.chunk, model.tokens[covered:], stream.cache_salt)
        assert self.intact(model)

    @rule(which=WHICH, count=st.integers(0, 12), at=st.none() | POINTS)
    def update(self, which: int, count: int, at: int | None) -> None:
        """KV of the caller's own."""
        pair = self.pair(which)
        ids = list(range(700, 700 + count))
        if self.run(lambda: pair.stream.update_kv(kv_of(ids), ids), at):
            return
        assert self.is_fresh(pair.stream.cache_salt)
        pair.model.edited(kv_of(ids), ids, self.chunk, [], pair.stream.cache_salt)
        assert self.intact(pair.model)

    @rule(which=WHICH, at=st.none() | POINTS)
    def retrieve(self, which: int, at: int | None) -> None:
        """Retrieving changes nothing."""
        pair = self.pair(which)
        found: list[torch.Tensor] = []

        async def call() -> None:
            found.append(await pair.stream.retrieve_kv(0))

        if self.can_retrieve(pair.model, call) and not self.run(call, at):
            chunks = self.cache.longest_prefix(MODEL, pair.model.tokens, pair.model.salt)
            assert torch.equal(found[-1], torch.cat(chunks, 2))

    @precondition(lambda self: len(self.pairs) < STREAMS)
    @rule(which=WHICH)
    def fork(self, which: int) -> None:
        """A second stream that goes on by itself."""
        pair = self.pair(which)
        forks: list[AsyncLMCacheStream] = []

        async def call() -> None:
            forks.append(await pair.stream.fork())

        self.run(call)
        self.pairs.append(Pair(forks[0], copy.deepcopy(pair.model)))

    @rule(which=WHICH, chunks=st.integers(0, 3))
    def evict(self, which: int, chunks: int) -> None:
        """The cache keeps some chunks of one stream and nothing else."""
        model = self.pair(which).model
        kept = self.cache.longest_prefix(MODEL, model.tokens, model.salt)[:chunks]
        self.cache.clear()
        if kept:
            self.cache.put(MODEL, model.tokens[: len(kept) * self.chunk], kept, model.salt)

    @rule(which=WHICH)
    def offload_late(self, which: int) -> None:
        """The engine offloads what it was sent, and what it generated, after it answered."""
        model = self.pair(which).model
        if self.intact(model):
            self.engine.offload(model.tokens, model.salt)

    @rule(which=WHICH, params=st.sampled_from([{"max_tokens": 0}, {"max_tokens": True}, {"max_tokens": "3"}]))
    def misuse(self, which: int, params: dict[str, Any]) -> None:
        """What cannot be right sends nothing, and a second operation while events are open is refused."""
        stream, model = self.pair(which).stream, self.pair(which).model
        sent = len(self.engine.sent)
        with pytest.raises(UsageError):
            self.run(lambda: stream.generate(params))
        with pytest.raises(UsageError):
            self.run(lambda: stream.generate({"max_tokens": 1}, [-1]))
        assert len(self.engine.sent) == sent
        ids = [*model.tokens, *model.suffix]
        if not ids or model.lost or not self.intact(model):
            return
        self.engine.plan = WELL

        async def call() -> None:
            async with aclosing(stream.events({"max_tokens": 3})) as events:
                await anext(events)
                for second in (stream.generate({"max_tokens": 1}), stream.retrieve_kv(), stream.fork()):
                    with pytest.raises(UsageError, match="one thing at a time"):
                        await second

        self.run(call)
        model.took(ids, self.engine.generated[:1])

    # Helpers.

    def is_fresh(self, salt: str) -> bool:
        """Whether it is a salt of its own, from the caller's."""
        fresh = salt not in self.salts and salt.startswith(f"{self.salt}~") and salt.count("~") == 1
        self.salts.add(salt)
        return fresh

    def can_retrieve(self, model: Model, call: Callable[[], Awaitable[Any]], *, part: bool = False) -> bool:
        """Whether the cache covers what was sent, or a part of it if that is enough; if not, `call` says so."""
        wanted = model.expected // self.chunk * self.chunk
        covered = self.cache.covered(MODEL, model.tokens[:wanted], model.salt)
        if wanted and (covered == wanted or (part and covered)):
            stream = next(pair.stream for pair in self.pairs if pair.model is model)
            suspected = stream._state.shared or stream._state.unverified  # others may have written there
            if not model.lost and (not suspected or self.intact(model)):
                return True
            with pytest.raises(EditNotUsed):
                self.run(call)
            model.lost = True
            return False
        with pytest.raises(CoverageTimeout if wanted else LMCacheStreamError):
            self.run(call)
        return False

    @invariant()
    def streams_are_as_specified(self) -> None:
        for pair in getattr(self, "pairs", []):
            stream, model = pair.stream, pair.model
            assert stream.tokens == model.tokens
            assert stream.suffix_tokens() == model.suffix
            assert stream.output_tokens() == model.output
            assert stream.decoded_tokens() == len(model.output)
            assert stream.output_text() == "".join(f"<{token}>" for token in model.output)
            assert stream.cache_salt == model.salt
            assert stream.is_done() is model.done
            assert stream.finish_reason() == model.finish_reason
        if hasattr(self, "engine"):
            assert self.engine.open == 0


TestStreamMachine = StreamMachine.TestCase
TestStreamMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=25)


async def test_a_stream_whose_edit_left_no_tokens_can_be_forked() -> None:
    async with aconnect(f"memory://{uuid.uuid4().hex}?chunk_size=4", geometry=GEOMETRY) as ctx:
        stream = AsyncLMCacheStream(ctx, lambda *_: [TokenEvent(7)], [1, 2])
        await stream.update_kv(kv_of([5, 6]), [5, 6])
        fork = await stream.fork()
        assert (fork.tokens, fork.suffix_tokens()) == ([], [5, 6])
        await fork.generate({"max_tokens": 1})
        assert (fork.tokens, stream.tokens) == ([5, 6, 7], [])


async def test_a_fork_does_not_take_for_its_edit_what_another_fork_had_recomputed() -> None:
    url = f"memory://{uuid.uuid4().hex}?chunk_size=4"
    cache = EmbeddedCache.open(url)
    cache.register_model(MODEL, GEOMETRY)
    try:
        async with aconnect(url) as ctx:
            engine = Engine(cache)
            stream = AsyncLMCacheStream(ctx, engine, [1, 2])
            await stream.update_kv(-kv_of(list(range(8))), list(range(8)))
            fork = await stream.fork()
            # Evicted on its way to the engine, which computes KV of its own and offloads that under the edit's salt.
            engine.plan = Plan(evicts=True)
            with pytest.raises(EditNotUsed):
                await stream.generate({"max_tokens": 1})
            engine.plan = WELL
            with pytest.raises(EditNotUsed):
                await fork.generate({"max_tokens": 1})
    finally:
        cache.unregister_model(MODEL)
        cache.close()
