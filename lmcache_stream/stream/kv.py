"""The cached KV of one stream: fetched when it is there, edited, stored, and known again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from lmcache_stream import observe
from lmcache_stream.callables import abandonable_thread, call
from lmcache_stream.editors.base import Edit, EditInput, Editor
from lmcache_stream.errors import CacheError, CoverageTimeout, EditNotUsed, LMCacheStreamError, StoreError, UsageError
from lmcache_stream.kvcache.context import AsyncKVCacheContext, StoreOutcome, check_timeout, whole_chunks
from lmcache_stream.stream.edits import ModifyFn, check_editor
from lmcache_stream.stream.state import ModifyReceipt, StreamState, check_token_ids, fresh_salt
from lmcache_stream.types import CacheKind

__all__ = ["Coverage", "OnShortfall", "StreamKV", "seconds_left"]

logger: logging.Logger = logging.getLogger("lmcache_stream.stream")

OnShortfall: TypeAlias = Literal["raise", "report"]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a stream's KV the cache has to hold before it is read.

    Args:
        timeout: Seconds to wait for that.
        poll_interval: Seconds between two looks, where the cache has to be asked.
        allow_partial: After `timeout`, take what there is.
        decode_saved: Wait for generated tokens too.
    """

    timeout: float
    poll_interval: float
    allow_partial: bool = False
    decode_saved: bool = False


class StreamKV:
    """What a stream does with its KV in the cache; it moves the stream's state when a store is whole, not before."""

    def __init__(
        self,
        ctx: AsyncKVCacheContext,
        state: StreamState,
        stream_id: str,
        *,
        salt_edits: bool,
        on_shortfall: OnShortfall,
    ) -> None:
        self._ctx = ctx
        self._state = state
        self._stream_id = stream_id
        self._salt_edits = salt_edits
        self._on_shortfall = on_shortfall

    async def retrieve(
        self,
        coverage: Coverage,
        *,
        seconds: dict[str, float] | None = None,
        needs_queries: Editor | None = None,
        deadline: float | None = None,
    ) -> torch.Tensor:
        """The KV of the longest cached prefix, `[2, L, hit_tokens, D]`, once the cache covers what was sent.

        Args:
            coverage: What to wait for.
            seconds: Takes the time of each step.
            needs_queries: An editor that is to be refused where the cache has no queries.
            deadline: Time of the loop at which the calls after the wait end; None: the context's own limit.
        """
        state = self._state
        seconds = {} if seconds is None else seconds
        chunk_size = self._ctx.chunk_size
        expected = len(state.tokens) if coverage.decode_saved else state.expected
        wanted = whole_chunks(expected, chunk_size)
        if not wanted:
            raise LMCacheStreamError(
                f"stream {self._stream_id}: {expected} tokens are less than one chunk of {chunk_size}: "
                "there will be no cached KV; use a longer prompt or a cache with smaller chunks"
            )
        loop = asyncio.get_running_loop()
        last = loop.time() + check_timeout(coverage.timeout)
        with self._at_the_cache("retrieving KV"):
            while True:
                with _timed(seconds, "wait"):
                    covered = await self._ctx.wait_for(
                        state.tokens[:wanted],
                        timeout=max(0.0, last - loop.time()),
                        poll_interval=coverage.poll_interval,
                        cache_salt=state.salt,
                    )
                seen = covered
                if covered >= wanted or coverage.allow_partial:
                    left = seconds_left(deadline, self._ctx.timeout)
                    if needs_queries is not None and not await self._ctx.lookup(
                        state.tokens[:wanted], state.salt, kind=CacheKind.QUERY, timeout=left
                    ):
                        raise needs_queries.without_queries()
                    with _timed(seconds, "retrieve"):
                        kv = await self._ctx.retrieve(state.tokens, state.salt, timeout=left)
                    seen = kv.shape[2] if kv is not None else 0
                    if kv is not None and (seen >= wanted or coverage.allow_partial):
                        await self._require_edit_in(kv)
                        return kv
                if loop.time() >= last or covered < wanted:
                    asked = (
                        "does the engine offload to this cache, under this model name and cache_salt, and has the "
                        "cache room?"
                        if state.last_metrics is not None
                        else 'this stream has sent no request yet: await generate({"max_tokens": 1}) first, so that '
                        "the engine offloads the prompt"
                    )
                    raise CoverageTimeout(
                        f"stream {self._stream_id}: after {coverage.timeout:g} s the cache covers {seen} of {wanted} "
                        f"tokens; {asked} (allow_partial=True takes what is there)",
                        seen=seen,
                        wanted=wanted,
                    )

    async def modify(
        self,
        fn: ModifyFn | Editor,
        coverage: Coverage,
        *,
        deadline: float | None = None,
    ) -> ModifyReceipt:
        """Retrieve, let `fn` edit, store: all or nothing; `deadline`, in the loop's time, bounds the calls."""
        check_editor(fn)
        with observe.span(
            "modify_kv",
            {"gen_ai.request.model": self._ctx.model_name},
            duration="lmcache_stream.modify.duration",
            measured=("gen_ai.request.model",),
            stream=self._stream_id,
        ) as span:
            receipt = await self._modified(fn, coverage, deadline)
            names = ("tokens_before", "tokens_after", "chunks_stored", "recomputed", "bytes_moved")
            told = {name: getattr(receipt, name) for name in names}
            logger.debug("stream %s: modified: %s", self._stream_id, told)
            span.set({f"lmcache_stream.modify.{name}": value for name, value in told.items()})
            span.record("lmcache_stream.modify.io", receipt.bytes_moved)
        return receipt

    async def update(self, kv: torch.Tensor, tokens: Sequence[int], *, timeout: float | None) -> None:
        """Store `kv` `[2, L, T, D]` for `T` tokens, which replace the stream's."""
        await self._store(kv, _check_pair(kv, tokens, like=None), tail=(), timeout=timeout)

    async def _modified(self, fn: ModifyFn | Editor, coverage: Coverage, deadline: float | None) -> ModifyReceipt:
        seconds: dict[str, float] = {}
        needs_queries = fn if isinstance(fn, Editor) and "queries" in fn.needs else None
        kv = await self.retrieve(coverage, seconds=seconds, needs_queries=needs_queries, deadline=deadline)
        shape, dtype, nbytes = kv.shape, kv.dtype, kv.nbytes
        covered = shape[2]
        prefix, tail = self._state.tokens[:covered], self._state.tokens[covered:]
        with _timed(seconds, "edit"):
            edit = await self._edit(fn, kv, prefix)
        del kv
        if edit is None:
            receipt = ModifyReceipt(
                tokens_before=covered,
                tokens_after=covered,
                bytes_moved=nbytes,
                seconds=seconds,
                salt=self._state.salt,
                stored=False,
            )
            self._state.last_receipt = receipt
            return receipt
        ids = _check_pair(edit.kv, edit.tokens, like=(shape, dtype))
        with _timed(seconds, "store"):
            stored = await self._store(edit.kv, ids, tail=tail, timeout=seconds_left(deadline, self._ctx.timeout))
        receipt = ModifyReceipt(
            tokens_before=covered,
            tokens_after=len(ids),
            kept_positions=edit.kept_positions,
            asked=edit.asked,
            chunks_stored=stored // self._ctx.chunk_size,
            recomputed=len(ids) - stored,
            bytes_moved=nbytes + (edit.kv.nbytes // len(ids) * stored if ids else 0),
            seconds=seconds,
            salt=self._state.salt,
        )
        self._state.last_receipt = receipt
        return receipt

    async def _edit(self, fn: Any, kv: torch.Tensor, tokens: list[int]) -> Edit | None:
        if isinstance(fn, Editor):
            queries = None
            if "queries" in fn.needs:
                with self._at_the_cache("retrieving queries"):
                    queries = await self._ctx.retrieve(tokens, self._state.salt, kind=CacheKind.QUERY)
            given = EditInput(
                kv=kv,
                tokens=tuple(tokens),
                geometry=self._ctx.geometry,
                chunk_size=self._ctx.chunk_size,
                queries=queries,
                spent=True,
            )
            version = kv._version
            edit: object = await abandonable_thread(fn.edit, given)
            if not isinstance(edit, Edit):
                raise UsageError(f"{type(fn).__name__}.edit must return an Edit, not {type(edit).__name__}")
            untouched = edit.kv is kv and kv._version == version  # which counts what is done in place
            return None if untouched and edit.tokens == given.tokens else edit
        result = await call(fn, kv, tokens.copy())
        if result is None:
            return None
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise UsageError(f"fn must return (new_kv, new_tokens) or None, not {type(result).__name__}")
        new_kv, new_tokens = result
        if not isinstance(new_kv, torch.Tensor) and isinstance(new_tokens, torch.Tensor) and new_tokens.ndim == 4:
            raise UsageError("fn must return (new_kv, new_tokens), in this order: KV came second")
        return Edit(kv=new_kv, tokens=tuple(check_token_ids(new_tokens, "new_tokens")), kept_positions=None)

    async def _store(self, kv: torch.Tensor, ids: list[int], *, tail: Sequence[int], timeout: float | None) -> int:
        """Store whole chunks, then move the state; the number of tokens stored."""
        state = self._state
        chunk_size = self._ctx.chunk_size
        whole = whole_chunks(len(ids), chunk_size)
        salt = fresh_salt(state.original_salt) if self._salt_edits else state.salt
        fingerprint = None
        if whole:
            kept = kv[:, :, :whole]
            with self._at_the_cache("storing the edit"):
                fingerprint = await self._ctx.executor.run(_fingerprint, kept)
                outcome = await self._ctx.put(kept, ids[:whole], salt, timeout=timeout)
            if not outcome.complete:
                raise StoreError(self._refusal(outcome))
        state.replace_prefix(ids[:whole], ids[whole:], tail, salt, fingerprint)
        return whole

    def _refusal(self, outcome: StoreOutcome) -> str:
        parts = []
        if outcome.kept:
            parts.append(
                f"{outcome.kept} are cached under these ids already and the cache keeps what it has "
                "(leave salt_edits on: an edit needs a cache_salt of its own)"
            )
        if outcome.missing:
            parts.append(f"for {outcome.missing} it has no room (give it more, or edit fewer streams at once)")
        return f"stream {self._stream_id}: of {outcome.chunks} chunks of the edit, " + ", and ".join(parts)

    async def require_edit(self, deadline: float | None) -> None:
        """Nobody else would tell: an engine recomputes an evicted edit from its ids without a word."""
        state = self._state
        if state.stored and not state.lost:
            with self._at_the_cache("looking up the edit"):
                state.lost = state.stored - await self.find_edit(seconds_left(deadline, self._ctx.timeout))
        self._refuse_a_lost_edit()

    async def look_for_edit(self, deadline: float | None) -> None:
        """Note whether the cache holds the edit itself, behind a request of which nothing else would tell."""
        state = self._state
        with self._at_the_cache("looking for the edit"):
            found = await self.find_edit(seconds_left(deadline, self._ctx.timeout))
        state.lost = max(state.lost, state.stored - found)
        state.unverified = False

    async def _require_edit_in(self, kv: torch.Tensor) -> None:
        """The same for KV that was retrieved: an engine may have put what it computed in the place of the edit."""
        state = self._state
        if state.stored and not state.lost and (state.unverified or state.shared):
            found = await self._ctx.executor.run(_fingerprint, kv[:, :, : state.stored])
            if kv.shape[2] < state.stored or state.fingerprint is None or not torch.equal(found, state.fingerprint):
                state.lost = state.stored
        self._refuse_a_lost_edit()

    async def find_edit(self, timeout: float | None = None) -> int:
        """How many tokens of the stored edit the cache still holds."""
        state = self._state
        ids = state.tokens[: state.stored]
        if not (state.unverified or state.shared):
            return min(state.stored, await self._ctx.lookup(ids, state.salt, timeout=timeout))
        kv = await self._ctx.retrieve(ids, state.salt, timeout=timeout)
        if kv is None or kv.shape[2] < state.stored:
            return kv.shape[2] if kv is not None else 0
        assert state.fingerprint is not None
        same = torch.equal(await self._ctx.executor.run(_fingerprint, kv), state.fingerprint)
        return state.stored if same else 0

    def _refuse_a_lost_edit(self) -> None:
        state = self._state
        if state.lost and self._on_shortfall == "raise":
            raise EditNotUsed(
                f"stream {self._stream_id}: the cache holds {state.stored - state.lost} of the edit's {state.stored} "
                "tokens: it was evicted before it was decoded from; give the cache more room or decode sooner, and "
                "start from the prompt",
                stored=state.stored,
                used=state.stored - state.lost,
            )

    @contextmanager
    def _at_the_cache(self, doing: str) -> Iterator[None]:
        try:
            yield
        except CacheError as error:
            raise LMCacheStreamError(f"stream {self._stream_id}: {doing}: {error}") from error


def _check_pair(kv: Any, tokens: Sequence[int], *, like: tuple[torch.Size, torch.dtype] | None) -> list[int]:
    """The ids that go with KV `[2, L, T, D]`; `like`: shape and dtype that an edit must keep."""
    ids = check_token_ids(tokens, "tokens")
    if not isinstance(kv, torch.Tensor):
        kind = f"{type(kv).__module__}.{type(kv).__qualname__}".removeprefix("builtins.")
        raise UsageError(f"KV must be a torch tensor [2, L, T, D], not {kind}")
    if kv.ndim != 4:
        raise UsageError(f"KV must be a torch tensor [2, L, T, D], not one of shape {list(kv.shape)}")
    if kv.shape[2] != len(ids):
        raise UsageError(f"KV of {kv.shape[2]} tokens does not fit {len(ids)} ids: give one id for each token of it")
    if like is not None:
        shape, dtype = like
        if (kv.shape[0], kv.shape[1], kv.shape[3]) != (shape[0], shape[1], shape[3]):
            raise UsageError(f"an edit must keep planes, layers and width: got {list(kv.shape)}, from {list(shape)}")
        if kv.dtype != dtype:
            raise UsageError(f"an edit must keep the dtype: got {kv.dtype}, from {dtype}; cast it back")
    return ids


def seconds_left(deadline: float | None, at_most: float) -> float | None:
    """Seconds until `deadline`, and no more than `at_most`; None where there is no deadline."""
    if deadline is None:
        return None
    return max(0.0, min(at_most, deadline - asyncio.get_running_loop().time()))


def _fingerprint(kv: torch.Tensor) -> torch.Tensor:
    """A sum over the bits of each plane and layer of `[P, L, T, D]`, int64 `[P, L]`: exact, whatever the order."""
    words = kv.detach().cpu().contiguous()
    wide = torch.int64 if words.shape[3] * words.element_size() % 8 == 0 else torch.uint8
    return words.view(wide).sum(dim=(2, 3), dtype=torch.int64)


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        with observe.span(
            step,
            {"lmcache_stream.step": step},
            duration="lmcache_stream.modify.duration",
            measured=("lmcache_stream.step",),
        ):
            yield
    finally:
        seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - start
