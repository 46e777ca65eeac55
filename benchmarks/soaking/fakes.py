"""The fake servers: an engine whose tokens tell which KV it decoded from, and a cache server with faults to order."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lmcache_stream.completions import CompletionsClient
from lmcache_stream.editors import EditInput, Editor, KeyDiff, Random, StreamingLLM
from lmcache_stream.errors import EditNotUsed, LMCacheStreamError, UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.kvcache.mp.connect import open_context
from lmcache_stream.rotary import Rotary, rerotate_
from lmcache_stream.stream import AsyncLMCacheStream
from lmcache_stream.testing import End, FakeEngine, RecordedRequest, Reply
from lmcache_stream.testing.fake_cache_server import FakeCacheServer, Fault, FaultKind
from soaking.jobs import Job, Patience, Step, World, in_turn

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from lmcache_stream.stream import ModifyReceipt
    from lmcache_stream.stream.edits import ModifyFn
    from soaking.tally import Tally

__all__ = ["FakeWorld"]

CHUNK = 16
VOCABULARY = 1000
LAYERS, HEADS, HEAD_DIM = 2, 2, 8
GEOMETRY = KVGeometry(
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_dim=HEAD_DIM,
    dtype=torch.float32,
    block_size=CHUNK,
    rotary=(Rotary((1.0, 0.3, 0.1, 0.03), HEAD_DIM),) * LAYERS,
)
MODEL = "soak/model"
POOL_BYTES = 32 << 20
MOST_CHUNKS = 4000
TROUBLE_EVERY = 0.4
ENGINE_FAULTS = 0.12
REMEMBERED = 100
"""Prompts whose KV the engine remembers, to tell what was wrong with it."""


class KnownModel:
    """A model that anybody can compute: KV by id and position, and tokens that depend on every value of the KV."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        width = LAYERS, HEADS * HEAD_DIM
        self._table = torch.randn(2, VOCABULARY, *width, generator=generator)
        self._weights = torch.randint(1, 2**31, (2, LAYERS, 1, HEADS * HEAD_DIM), generator=generator) * 2 + 1

    def kv(self, ids: list[int]) -> torch.Tensor:
        """KV `[2, L, T, D]` of ids that nobody edited: values by id, keys by id and rotated to their positions."""
        kv = self._table[:, ids].transpose(1, 2).contiguous()
        assert GEOMETRY.rotary is not None
        rerotate_(kv[0], torch.zeros(len(ids), dtype=torch.int64), torch.arange(len(ids)), GEOMETRY.rotary)
        return kv

    def tokens(self, kv: torch.Tensor, count: int) -> list[int]:
        """What is generated after KV `[2, L, T, D]`."""
        words = kv.contiguous().view(torch.int32).to(torch.int64) * self._weights
        places = torch.arange(kv.shape[2]) * 0x9E3779B1 + 1
        state = int((words.sum(dim=(0, 1, 3)) * places).sum()) & (2**64 - 1)
        found = []
        for _ in range(count):
            state = (state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
            found.append((state >> 33) % VOCABULARY)
        return found


class SoakEngine(FakeEngine):
    """Decodes from what the cache server holds, computes the rest, and offloads it after it has answered."""

    def __init__(self, known: KnownModel, cache: FakeCacheServer, tally: Tally, draws: random.Random) -> None:
        super().__init__(model=MODEL)
        self.stormy = False
        self.decoded_from: dict[tuple[str | int, ...], torch.Tensor] = {}
        self._known = known
        self._cache_server = cache
        self._tally = tally
        self._draws = draws

    def _reply_to(self, request: RecordedRequest) -> tuple[Reply, Iterable[bytes]]:
        if request.path == "/v1/completions":
            self.requests.clear()
            ids, salt = list(request.json["prompt"]), request.json.get("cache_salt", "")
            count = request.json["max_tokens"]
            kv = self._known.kv(ids)
            held = self._cache_server.read(MODEL, ids, salt)
            kv[:, :, : held.shape[2]] = held
            self.decoded_from[salt, *ids] = kv
            if len(self.decoded_from) > REMEMBERED:
                del self.decoded_from[next(iter(self.decoded_from))]
            asyncio.get_running_loop().call_later(0.02 * self._draws.random(), self._offload, ids, salt, kv)
            reply = Reply(
                tokens=self._known.tokens(kv, count),
                cached_tokens=min(held.shape[2], len(ids) - 1),
                tokens_per_event=self._draws.choice((1, 1, 2, 3)),
                pace=self._draws.choice((None, 0, 0.002)),
                write_size=self._draws.choice((None, None, 7)),
                comments=self._draws.random() < 0.2,
            )
            if self.stormy and self._draws.random() < ENGINE_FAULTS:
                reply = self._spoiled(reply, count)
            self.script(reply)
        return super()._reply_to(request)

    def _spoiled(self, reply: Reply, count: int) -> Reply:
        after = self._draws.randint(0, count)
        faults: dict[str, Reply] = {
            "engine: 500": Reply(status=500, body=b'{"error": {"message": "no"}}'),
            "engine: 503": Reply(status=503, body=b"busy"),
            "engine: 400": Reply(status=400, body=b'{"error": {"message": "no"}}'),
            "engine: error in the stream": replace(reply, error_after=after),
            "engine: cut between events": replace(reply, end_after=after, end=End.CUT),
            "engine: cut inside an event": replace(reply, end_after_bytes=self._draws.randint(1, 400), end=End.CUT),
            "engine: reset": replace(reply, end_after=after, end=End.RESET),
            "engine: stall": replace(reply, end_after=after, end=End.STALL),
            "engine: garbage": replace(reply, body=b"data: {nonsense\n\n"),
            "engine: no ids": replace(reply, ids=False),
            "engine: no end": replace(reply, end_after=after),
            "engine: slow headers": replace(reply, header_delay=0.3),
            "engine: no HTTP": replace(reply, raw=b"\x00\x01\x02\r\n\r\n"),
        }
        name = self._draws.choice(sorted(faults))
        self._tally.faults[name] += 1
        return faults[name]

    def _offload(self, ids: list[int], salt: str, kv: torch.Tensor) -> None:
        cache = self._cache_server
        cache.offload(MODEL, ids, salt, kv)
        beyond = cache.chunks - MOST_CHUNKS
        if beyond > 0:
            cache.evict(beyond + MOST_CHUNKS // 4)


class KnownJob(Job):
    """A stream whose KV is computed here as well, edit by edit."""

    def __init__(
        self, stream: AsyncLMCacheStream, model: KnownModel, engine: SoakEngine, chance: random.Random
    ) -> None:
        self.stream = stream
        self._engine = engine
        self._history: list[str] = []
        self._model = model
        self._chance = chance
        self._edit: torch.Tensor | None = None
        self._left = False
        self._remembered: tuple[list[int], list[int], str, list[int]]

    def steps(self) -> Iterator[Step]:
        yield Step("prefill", 1)
        for _ in range(self._chance.choice((1, 1, 1, 2, 3))):
            yield Step("modify", editor=self._chance.choice(EDITORS))
            count = self._chance.randint(1, 24)
            if self._chance.random() < 0.5:
                yield Step("decode", count)
            else:
                yield Step("events", count, self._chance.choice((None, self._chance.randint(1, count))))

    def before(self, step: Step) -> None:
        stream = self.stream
        self._remembered = stream.tokens, stream.suffix_tokens(), stream.cache_salt, stream.output_tokens()

    def requested(self, step: Step, failure: BaseException | None, tally: Tally) -> None:
        tokens, suffix, salt, before = self._remembered
        stream = self.stream
        ids = [*tokens, *suffix]
        self._history.append(f"{step.kind} {type(failure).__name__ if failure else 'ok'}")
        arrived = stream.output_tokens()[len(before) :]
        tally.tokens += len(arrived)
        tally.states += 1
        moved = (stream.tokens, stream.suffix_tokens(), stream.cache_salt) == ([*ids, *arrived], [], salt)
        still = (stream.tokens, stream.suffix_tokens(), stream.cache_salt) == (tokens, suffix, salt)
        if not (moved if arrived or failure is None else moved or still):
            tally.wrong_state(f"after {step.kind} ({failure!r}) with {len(arrived)} tokens: {stream!r}")
        if isinstance(failure, LMCacheStreamError) and failure.arrived != len(arrived):
            tally.wrong_state(f"{step.kind}: {failure.arrived} arrived, says {failure!r}, but {len(arrived)} did")
        self._left = self._left or step.leave_after is not None  # an event's text comes with its last token
        if not self._left and stream.output_text() != "".join(f" {token}" for token in stream.output_tokens()):
            tally.wrong_state(f"after {step.kind}: the text is not that of the tokens")
        wanted = step.leave_after or step.tokens
        if failure is None and len(arrived) != wanted:
            tally.wrong_token(f"{step.kind}: {len(arrived)} tokens of {wanted} without an error")
        stored = self._edit.shape[2] if self._edit is not None else 0
        found = [used for used in range(stored, -1, -CHUNK) if self._expected(ids, used, len(arrived)) == arrived]
        certain = failure is None and step.leave_after is None  # else nobody said how much of the edit was used
        if isinstance(failure, EditNotUsed):
            tally.flagged += len(arrived)
        elif not certain:
            tally.doubtful += len(arrived)
        if not found or (certain and stored not in found):
            came_from = f"of {found[0]} tokens of the edit's {stored}" if found else self._seen(ids, salt, stored)
            history = ", ".join(self._history)
            tally.wrong_token(f"{step.kind}: {len(arrived)} tokens {came_from}; stream: {history}", len(arrived))

    def _seen(self, ids: list[int], salt: str, stored: int) -> str:
        """What was wrong with the KV that the engine decoded from, chunk by chunk of the edit."""
        seen = self._engine.decoded_from.get((salt, *ids))
        if seen is None:
            return "of no known KV"
        edit, plain = self._kv(ids, stored), self._model.kv(ids)
        words = []
        for at in range(0, len(ids), CHUNK):
            part = (slice(None), slice(None), slice(at, at + CHUNK))
            if torch.equal(seen[part], edit[part]):
                words.append("right")
            else:
                words.append(
                    "plain" if torch.equal(seen[part], plain[part]) else f"{seen[part].flatten()[:3].tolist()}"
                )
        return f"of an edit of {stored} with chunks {words}"

    def _expected(self, ids: list[int], used: int, count: int) -> list[int]:
        return self._model.tokens(self._kv(ids, used), count)

    def _kv(self, ids: list[int], used: int) -> torch.Tensor:
        kv = self._model.kv(ids)
        if self._edit is not None:
            kv[:, :, :used] = self._edit[:, :, :used]
        return kv

    def edited(self, step: Step, receipt: ModifyReceipt | None, tally: Tally) -> None:
        tokens, suffix, salt, _ = self._remembered
        stream = self.stream
        tally.states += 1
        name = getattr(step.editor, "name", getattr(step.editor, "__name__", ""))
        self._history.append(f"{name} {'ok' if receipt is not None else 'failed'}")
        if receipt is None or not receipt.stored:
            if (stream.tokens, stream.suffix_tokens(), stream.cache_salt) != (tokens, suffix, salt):
                tally.wrong_state(f"an edit that failed or kept all left {stream!r}")
            return
        covered = receipt.tokens_before
        kv = self._kv(tokens, self._edit.shape[2] if self._edit is not None else 0)[:, :, :covered].contiguous()
        assert step.editor is not None
        kv, ids = edit(step.editor, kv, tokens[:covered])
        whole = len(ids) // CHUNK * CHUNK
        self._edit = kv[:, :, :whole].clone()
        if stream.tokens != ids[:whole] or stream.suffix_tokens() != [*ids[whole:], *tokens[covered:], *suffix]:
            tally.wrong_state(f"an edit left {stream!r}")


def edit(editor: ModifyFn | Editor, kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    """What an editor makes of KV, without any server."""
    if isinstance(editor, Editor):
        done = editor.edit(EditInput(kv=kv, tokens=tuple(tokens), geometry=GEOMETRY, chunk_size=CHUNK))
        return done.kv, list(done.tokens)
    if editor is negated_values:
        return negate_values(kv), tokens
    return every_other(kv, tokens)


def every_other(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    return kv[:, :, ::2].contiguous(), tokens[::2]


def negate_values(kv: torch.Tensor) -> torch.Tensor:
    kv[1].neg_()
    return kv


async def negated_values(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    await asyncio.sleep(0)
    return negate_values(kv), tokens


EDITORS: tuple[Any, ...] = (
    every_other,
    negated_values,
    StreamingLLM(keep=0.5, sinks=4),
    Random(keep=0.5, seed=1),
    KeyDiff(keep=0.5),
)


class FakeWorld(World):
    """The fake servers in this process, over ZMQ, in shared memory or with pickles."""

    name = "fakes"

    def __init__(
        self, tally: Tally, seed: int, *, streams: int, storm_s: float, calm_s: float, shared_memory: bool = True
    ) -> None:
        self.streams, self.storm_s, self.calm_s = streams, storm_s, calm_s
        self._tally = tally
        self._chance = random.Random(seed)
        self._model = KnownModel()
        self._server = FakeCacheServer(chunk_size=CHUNK, pool_bytes=POOL_BYTES, shared_memory=shared_memory)
        self._engine = SoakEngine(self._model, self._server, tally, random.Random(seed + 1))
        self._holds: list[Fault] = []
        self._unusable = 0

    async def __aenter__(self) -> Self:
        self._server.start()
        self._server.serve(MODEL, GEOMETRY)
        await self._engine.start()
        self._client = CompletionsClient(self._engine.base_url, model=MODEL)
        self.ctx = self._ctx = await open_context(
            self._server.url, http_url=self._server.http_url, model_name=MODEL, geometry=GEOMETRY, timeout=30
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._ctx.close()
        await self._client.aclose()
        await self._engine.stop()
        await asyncio.to_thread(self._server.stop)

    def job(self, chance: random.Random) -> Job:
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(3 * CHUNK, 10 * CHUNK))]
        salt = chance.choice(("", "", f"tenant-{chance.randrange(3)}"))
        return KnownJob(AsyncLMCacheStream(self.ctx, self._client, prompt, salt), self._model, self._engine, chance)

    def patience(self) -> Patience:
        return Patience(60, 60, 0.05) if self.calm else Patience(5, 4, 0.05)

    async def storm(self, until: Callable[[], bool]) -> None:
        self._ctx.timeout = 2.5
        self._engine.stormy = True
        often = [self._order_fault] * 14
        rarely = [self._evict, self._evict, self._forget, self._restart, self._hide, self._reopen]
        await in_turn([*often, *rarely], self._chance, TROUBLE_EVERY, until)

    async def settle(self) -> None:
        self._engine.stormy = False
        self._ctx.timeout = 30
        with self._server._lock:
            self._server._faults.clear()
        for fault in self._holds:
            fault.release()
        self._holds.clear()
        self._server.http_status = 200
        await asyncio.sleep(0.1)

    async def held(self) -> dict[str, int]:
        held = self._server.held
        if held.get("writes", 0) <= self._unusable:
            # Slots that a client was told nothing usable of cannot be written, and what is not written stays reserved.
            held = {name: count for name, count in held.items() if name not in ("writes", "reservations")}
        return held

    def owns(self, segment: str) -> bool:
        return f"_{os.getpid()}_" in segment

    def describe(self) -> dict[str, Any]:
        return {
            "wrong_publications": self._server.wrong_publications,
            "wrong_unlocks": self._server.wrong_unlocks,
            "cache_requests": self._server.calls.total(),
        }

    async def _order_fault(self) -> None:
        operation, kinds = self._chance.choice(CACHE_FAULTS)
        kind = self._chance.choice(kinds)
        if kind == "ignore" and operation is wire.PREPARE_RETRIEVE and not self._server.shm_name:
            return  # pickled, an answered request lets go of its locks: nobody can tell whether a silent one did
        try:
            fault = self._server.fault(operation, kind, seconds=3 * self._chance.random() if kind == "hold" else None)
        except UsageError:
            return  # not over this transport
        self._tally.faults[f"cache: {operation.name.removesuffix('_kv_cache_engine_driven_context')}: {kind}"] += 1
        if kind == "hold":
            self._holds.append(fault)
        if operation is wire.PREPARE_STORE and kind in UNUSABLE:
            self._unusable += 1

    async def _evict(self) -> None:
        self._tally.faults["cache: eviction"] += 1
        self._server.evict(self._chance.choice((10, 10, 100, 100, POOL_BYTES)))

    async def _forget(self) -> None:
        self._tally.faults["cache: registration forgotten"] += 1
        self._server.forget()

    async def _restart(self) -> None:
        self._tally.faults["cache: killed and restarted"] += 1
        self._unusable = 0
        await asyncio.to_thread(self._server.kill)
        await asyncio.sleep(0.5 * self._chance.random())
        await asyncio.to_thread(self._server.restart)

    async def _hide(self) -> None:
        self._tally.faults["cache: /status answers 503"] += 1
        self._server.http_status = 503
        await asyncio.sleep(0.3 * self._chance.random())
        self._server.http_status = 200

    async def _reopen(self) -> None:
        self._tally.faults["engine: stopped and started"] += 1
        await self._engine.stop()
        await asyncio.sleep(0.2 * self._chance.random())
        await self._engine.start()


BAD_ANSWER: tuple[FaultKind, ...] = (
    *("lose", "hold", "duplicate", "garble", "wrong-operation", "wrong-type", "nothing", "frames", "unknown"),
)
UNUSABLE = (
    *("lose", "garble", "wrong-operation", "wrong-type", "nothing", "frames", "unknown"),
    *("few", "empty", "outside", "overlap", "shape", "dtype"),
)
BAD_CHUNKS: tuple[FaultKind, ...] = ("few", "empty", "outside", "overlap", "shape", "dtype", "pickle")
AT_ONCE: tuple[FaultKind, ...] = ("evict", "forget", "restart")
CACHE_FAULTS: tuple[tuple[wire.Operation[Any], tuple[FaultKind, ...]], ...] = (
    (wire.LOOKUP, ("ignore", *BAD_ANSWER, *AT_ONCE)),
    (wire.WAIT_PREFETCH_STATUS, ("too-many", *BAD_ANSWER, *AT_ONCE)),
    (wire.FREE_LOOKUP_LOCKS, BAD_ANSWER),
    (wire.END_SESSION, BAD_ANSWER),
    (wire.REGISTER, ("ignore", *BAD_ANSWER)),
    (wire.PREPARE_STORE, ("ignore", "no-room", *BAD_ANSWER, *BAD_CHUNKS, *AT_ONCE)),
    (wire.COMMIT_STORE, (*BAD_ANSWER, *AT_ONCE)),
    (wire.PREPARE_RETRIEVE, ("ignore", *BAD_ANSWER, *BAD_CHUNKS, *AT_ONCE)),
    (wire.COMMIT_RETRIEVE, (*BAD_ANSWER, *AT_ONCE)),
)
"""A request to let go is never ignored: what it was for would stay on the server, whoever the client is."""
