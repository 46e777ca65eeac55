"""Proves how stored KV is to be read, from one request and without the model.

A prompt of few ids in an irregular order is sent, its KV is read in every way that fits, and each reading is judged by
what lies in layer 0.
"""

from __future__ import annotations

import math
import random
import uuid
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from lmcache_stream.callables import event_batches
from lmcache_stream.errors import CacheTimeout, EngineResponseError, GeometryError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.judge import Verdict, judge, ranges
from lmcache_stream.kvcache.mp.readings import Reading, readings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from lmcache_stream.kvcache.mp.codec import Codec
    from lmcache_stream.transfer import TransferExecutor
    from lmcache_stream.types import AsyncPostCompletion, PostCompletion

__all__ = ["ProbeResult", "ProbeTarget", "probe", "probe_prompt"]

SPAN = 2048
"""Positions that equal ids are apart, where the model takes that many."""

SHORTEST_SPAN = 128

TOKEN_IDS = (11, 29, 53, 83, 127, 191)
"""Ids that every vocabulary has."""


class ProbeTarget(Protocol):
    """What a probe needs of a context."""

    @property
    def model_name(self) -> str:
        """Name of the model in the cache."""
        ...

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk."""
        ...

    @property
    def geometry(self) -> KVGeometry | None:
        """Shape of the KV, as far as known."""
        ...

    @property
    def executor(self) -> TransferExecutor:
        """Where copies run."""
        ...

    async def wait_for(self, tokens: Sequence[int], *, timeout: float, cache_salt: str = "") -> int:
        """Wait until the tokens are cached; returns how many are."""
        ...

    async def retrieve_stored(
        self, tokens: Sequence[int], cache_salt: str = "", *, timeout: float | None = None
    ) -> list[list[Tensor]] | None:
        """Fetch the chunks as the cache holds them: for each rank, private copies in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """How the KV is to be read.

    Args:
        reading: The reading that proved itself.
        geometry: The shape of the KV, over all ranks. Positions that nobody told stay unknown: only layer 0's can be
            proven, and models exist whose layers differ.
        proven: What the probe has shown, in words.
        unproven: What it could not show and must come from the model's configuration, in words.
        span: Positions that equal ids were apart.
        verdicts: Of the first rank, for every reading tried.
    """

    reading: Reading
    geometry: KVGeometry
    proven: tuple[str, ...]
    unproven: tuple[str, ...]
    span: int
    verdicts: tuple[Verdict, ...]

    @property
    def codec(self) -> Codec:
        """The codec that reads each rank's chunks."""
        return self.reading.codec


async def probe(
    context: ProbeTarget, engine: PostCompletion | AsyncPostCompletion, *, timeout: float = 60.0
) -> ProbeResult:
    """Prove the reading of an engine's KV from one request of one token, under a scratch salt.

    Args:
        context: The cache that the engine offloads to.
        engine: Called with the prompt, `{"max_tokens": 1, "temperature": 0}` and the salt; the prompt is made shorter
            while it is refused as too long.
        timeout: Seconds for the KV to come into the cache, and again to fetch it.

    Raises:
        UsageError: `engine` gives nothing that can be iterated.
        GeometryError: No reading proves itself, or two different ones do; the message has the measured spreads.
        CacheTimeout: The engine's KV did not come into the cache.
        EngineError: The engine failed.
    """
    salt = f"probe-{uuid.uuid4().hex}"
    span = SPAN
    while True:
        prompt = probe_prompt(context.chunk_size, span)
        try:
            await _run(engine, prompt, salt)
            break
        except EngineResponseError as error:
            if error.status != 400 or span // 2 < SHORTEST_SPAN:
                raise
            span //= 2

    tokens = prompt[:-1]
    covered = await context.wait_for(tokens, timeout=timeout, cache_salt=salt)
    if covered < len(tokens):
        raise CacheTimeout(
            f"the cache holds {covered} of the probe's {len(tokens)} tokens after {timeout:g} s: does this engine "
            f"serve {context.model_name!r} with LMCache's MP connector, and does it honour cache_salt?"
        )
    ranks = await context.retrieve_stored(tokens, salt, timeout=timeout)
    if not ranks or any(len(chunks) * context.chunk_size < len(tokens) for chunks in ranks):
        raise CacheTimeout("the cache lost the probe's KV before it could be read: try again")
    return await context.executor.run(_conclude, context.model_name, ranks, tokens, context.geometry)


def probe_prompt(chunk_size: int, span: int = SPAN) -> list[int]:
    """Make a prompt of whole chunks and one more token: few ids in an irregular order, equal ones `span` apart."""
    count = len(TOKEN_IDS)
    length = -(-(span + 3 * count) // chunk_size) * chunk_size
    order = random.Random(0)
    middle = order.choices(TOKEN_IDS, k=length + 1 - 2 * count)
    return order.sample(TOKEN_IDS, count) + middle + order.sample(TOKEN_IDS, count)


async def _run(engine: PostCompletion | AsyncPostCompletion, prompt: list[int], salt: str) -> None:
    async with aclosing(event_batches(engine, list(prompt), {"max_tokens": 1, "temperature": 0}, salt)) as batches:
        async for _ in batches:
            pass


def _conclude(
    model_name: str, ranks: list[list[Tensor]], tokens: Sequence[int], geometry: KVGeometry | None
) -> ProbeResult:
    dtype = ranks[0][0].dtype
    if geometry is not None and geometry.dtype not in (None, dtype):
        raise GeometryError(f"the cache holds {dtype} for {model_name!r}, but the geometry given says {geometry.dtype}")
    if not dtype.is_floating_point:
        raise GeometryError(f"the cache holds {dtype} for {model_name!r}, in which nothing can be proven")
    candidates = readings(ranks[0][0], geometry, len(ranks))
    by_rank = [judge(chunks, tokens, candidates) for chunks in ranks]
    # A reading must hold on every rank; what one rank cannot prove is not proven.
    right = [of_ranks for of_ranks in zip(*by_rank, strict=True) if all(verdict.accepted for verdict in of_ranks)]
    if not right:
        tried = sorted(by_rank[0], key=_badness)
        shown = "; ".join(map(str, tried[:6])) or f"nothing fits chunks of {list(ranks[0][0].shape)}"
        raise GeometryError(
            f"no reading of the KV of {model_name!r} proves itself. Spread within equal ids over spread in all: {shown}"
            + (f"; and {len(tried) - 6} more" if len(tried) > 6 else "")
        )
    codecs = {verdicts[0].reading.codec for verdicts in right}
    if len(codecs) > 1:
        shown = "; ".join(str(verdicts[0]) for verdicts in right)
        raise GeometryError(f"the KV of {model_name!r} can be read in several ways, and all prove themselves: {shown}")
    best = max(right, key=lambda verdicts: sum(verdicts[0].pairs_proven))
    return _result(best, tuple(by_rank[0]), dtype, geometry, len(ranks))


def _badness(verdict: Verdict) -> float:
    if math.isnan(verdict.key_spread):
        return math.inf if verdict.value_spread is None else 1e6 + verdict.value_spread
    return verdict.key_spread


def _result(
    best: Sequence[Verdict],
    verdicts: tuple[Verdict, ...],
    dtype: torch.dtype,
    geometry: KVGeometry | None,
    world_size: int,
) -> ProbeResult:
    reading = best[0].reading
    codec, rotary = reading.codec, reading.rotary
    pairs_proven = [all(of_ranks) for of_ranks in zip(*(verdict.pairs_proven for verdict in best), strict=True)]
    known = geometry.rotary if geometry is not None else None
    if geometry is None:
        geometry = KVGeometry(
            num_layers=codec.num_layers,
            num_kv_heads=codec.heads * (1 if codec.planes == 1 else world_size),
            head_dim=codec.head_dim,
            block_size=codec.block_size,
            planes=codec.planes,
            world_size=world_size,
        )
    geometry = replace(geometry, dtype=dtype)
    proven = [f"packing {codec.name}", "K and V, in this order" if codec.planes == 2 else "one latent plane"]
    unproven: list[str] = []
    if rotary is None:
        (unproven if codec.heads > 1 else proven).append(f"{codec.heads} heads of {codec.head_dim}")
        proven.append("no positions in layer 0")
    else:
        proven.append(f"{codec.heads} heads of {codec.head_dim} on each rank")
        kind = "interleaved" if rotary.interleaved else "half-split"
        for pairs, words in ((True, proven), (False, unproven)):
            numbers = [i for i, is_proven in enumerate(pairs_proven) if is_proven is pairs]
            if numbers:
                words.append(f"{kind} rotary pairs {ranges(numbers)} of layer 0")
    if known is not None:
        others = [i for i, of_layer in enumerate(known) if of_layer != rotary]
        if others:
            unproven.append(f"rotary positions of layers {ranges(others)}, which differ from layer 0's")
    elif codec.num_layers > 1:
        unproven.append(f"rotary positions of layers {ranges(range(1, codec.num_layers))}")
        unknown = "a probe proves layer 0's positions only: connect with geometry=KVGeometry.from_config(...)"
        geometry = replace(geometry, rotary_unknown=geometry.rotary_unknown or unknown)
    return ProbeResult(
        reading=reading,
        geometry=geometry,
        proven=tuple(proven),
        unproven=tuple(unproven),
        span=best[0].span,
        verdicts=verdicts,
    )
