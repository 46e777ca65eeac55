"""Proves how stored KV is to be read, from one request and without the model.

At layer 0 a token's value depends on the token alone, and so does its key once the rotary position is undone. So a
prompt of few ids in an irregular order is sent, and its KV is read in every way that fits. Under the right reading the
entries of equal ids are equal but for rounding; under any other they are not.

A reading is accepted if in V, in what K has without position, and in each rotary pair the variance among equal ids
stays below `MARGIN` times what rounding to the dtype makes. Readings are verified, not fitted: a pair that turns so
little over the prompt that a wrong frequency would not have shown is reported as unproven.
"""

from __future__ import annotations

import inspect
import math
import random
import uuid
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lmcache_stream.errors import CacheTimeout, EngineResponseError, GeometryError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.codec import CODECS, Codec
from lmcache_stream.rotary import Rotary, rerotate_

if TYPE_CHECKING:
    from torch import Tensor

    from lmcache_stream.transfer import TransferExecutor
    from lmcache_stream.types import AsyncPostCompletion

__all__ = ["ProbeResult", "ProbeTarget", "Reading", "Verdict", "judge", "probe", "probe_prompt", "readings"]

MARGIN = 20.0
"""How many times the variance of rounding equal ids may have."""

RESOLUTION = 0.001
"""A rotary pair is proven if a frequency off by this share would have been noticed."""

SPAN = 2048
"""Positions that equal ids are apart, where the model takes that many."""

SHORTEST_SPAN = 128

TOKEN_IDS = (11, 29, 53, 83, 127, 191)
"""Ids that every vocabulary has."""

COMMON_BASES = (1e4, 1e5, 1.5e5, 5e5, 1e6, 2e6, 5e6, 1e7)
COMMON_HEAD_DIMS = (64, 128, 80, 96, 256, 32, 112, 160, 192)


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


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read stored chunks.

    Args:
        codec: Packing, heads and head size of one rank.
        rotary: Positions of layer 0; None: it has none.
    """

    codec: Codec
    rotary: Rotary | None

    def __str__(self) -> str:
        codec = self.codec
        shape = f"{codec.name}, {codec.heads} x {codec.head_dim}"
        if self.rotary is None:
            return f"{shape}, no positions"
        kind = "interleaved" if self.rotary.interleaved else "half-split"
        pairs = self.rotary.inv_freq
        return f"{shape}, {len(pairs)} {kind} rotary pairs of {pairs[0]:.4g} to {pairs[-1]:.4g} radians"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the KV says about a reading.

    Args:
        reading: The reading.
        accepted: Whether it proves itself.
        reason: Why not; empty if it does.
        key_spread: Spread of K (positions undone) within equal ids over its spread in all; NaN if V refused it before.
        value_spread: The same of V; None where the reading has no V.
        pairs: For each rotary pair, the spread within equal ids over the size of its values.
        pairs_proven: For each rotary pair, whether a wrong frequency would have shown.
        span: Positions that equal ids are apart at most.
    """

    reading: Reading
    accepted: bool
    reason: str = ""
    key_spread: float = math.nan
    value_spread: float | None = None
    pairs: tuple[float, ...] = ()
    pairs_proven: tuple[bool, ...] = ()
    span: int = 0

    def __str__(self) -> str:
        spreads = [("K", self.key_spread), ("V", math.nan if self.value_spread is None else self.value_spread)]
        measured = ", ".join(f"{name} {spread:.2g}" for name, spread in spreads if not math.isnan(spread))
        return ": ".join(filter(None, [str(self.reading), measured])) + (f" ({self.reason})" if self.reason else "")


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
    context: ProbeTarget,
    engine: AsyncPostCompletion,
    *,
    timeout: float = 60.0,
    span: int = SPAN,
    token_ids: Sequence[int] = TOKEN_IDS,
) -> ProbeResult:
    """Prove the reading of an engine's KV from one request of one token, under a scratch salt.

    Args:
        context: The cache that the engine offloads to.
        engine: Called with the prompt, `{"max_tokens": 1, "temperature": 0}` and the salt.
        timeout: Seconds for the KV to come into the cache, and again to fetch it.
        span: Positions that equal ids are apart; halved while the engine refuses the prompt as too long.
        token_ids: The few ids that the prompt is made of.

    Raises:
        GeometryError: No reading proves itself, or two different ones do; the message has the measured spreads.
        CacheTimeout: The engine's KV did not come into the cache.
        EngineError: The engine failed.
    """
    salt = f"probe-{uuid.uuid4().hex}"
    while True:
        prompt = probe_prompt(context.chunk_size, span, token_ids)
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


def probe_prompt(chunk_size: int, span: int = SPAN, token_ids: Sequence[int] = TOKEN_IDS) -> list[int]:
    """Make a prompt of whole chunks and one more token: few ids in an irregular order, equal ones `span` apart."""
    ids = list(token_ids)
    length = -(-(span + 3 * len(ids)) // chunk_size) * chunk_size
    order = random.Random(0)
    middle = order.choices(ids, k=length + 1 - 2 * len(ids))
    return order.sample(ids, len(ids)) + middle + order.sample(ids, len(ids))


async def _run(engine: AsyncPostCompletion, prompt: list[int], salt: str) -> None:
    events: Any = engine(list(prompt), {"max_tokens": 1, "temperature": 0}, salt)
    if inspect.isawaitable(events):
        events = await events
    if isinstance(events, AsyncIterable):
        async for _ in events:
            pass
    else:
        for _ in events:
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
                words.append(f"{kind} rotary pairs {_ranges(numbers)} of layer 0")
    if known is not None:
        others = [i for i, of_layer in enumerate(known) if of_layer != rotary]
        if others:
            unproven.append(f"rotary positions of layers {_ranges(others)}, which differ from layer 0's")
    elif codec.num_layers > 1:
        unproven.append(f"rotary positions of layers {_ranges(range(1, codec.num_layers))}")
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


def _ranges(numbers: Sequence[int]) -> str:
    """Write [0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] + 1 == number:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def readings(chunk: Tensor, geometry: KVGeometry | None, world_size: int = 1) -> list[Reading]:
    """List every reading that fits a stored chunk.

    Args:
        chunk: A chunk of one rank as the cache holds it: `[2, L, C, D]` or `[L, C, width]`, a leading 1 allowed.
        geometry: What is known of the KV; what is not known is taken from what is common among models.
        world_size: Ranks that share the heads.
    """
    shape = tuple(chunk.shape[1:] if chunk.dim() == 4 and chunk.shape[0] == 1 else chunk.shape)
    num_layers, tokens = shape[-3], shape[-2]
    if geometry is not None and geometry.num_layers != num_layers:
        return []
    found: list[Reading] = []
    for codec_type in CODECS.values():
        for heads, head_dim in _heads(codec_type, shape, geometry, world_size):
            for block_size in _block_sizes(codec_type, tokens, geometry):
                codec = codec_type(num_layers, heads, head_dim, block_size)
                if codec.stored_shape(tokens) == shape:
                    found += [Reading(codec, rotary) for rotary in _rotaries(codec, geometry)]
    return found


def _heads(
    codec_type: type[Codec], shape: tuple[int, ...], geometry: KVGeometry | None, world_size: int
) -> list[tuple[int, int]]:
    if geometry is not None:
        if geometry.planes != codec_type.planes:
            return []
        heads = geometry.num_kv_heads if geometry.planes == 1 else geometry.num_kv_heads // world_size
        return [(heads, geometry.head_dim)] if heads else []
    width = shape[-1]
    if codec_type.planes == 1:
        return [(1, width)]
    if codec_type.stored_mla:
        width //= 2
    return [(width // head_dim, head_dim) for head_dim in COMMON_HEAD_DIMS if width and width % head_dim == 0]


def _block_sizes(codec_type: type[Codec], tokens: int, geometry: KVGeometry | None) -> list[int | None]:
    if geometry is not None and geometry.block_size is not None:
        return [geometry.block_size] if tokens % geometry.block_size == 0 else []
    if codec_type.name != "cpu-packed":
        return [None]
    return [size for size in (32, 64, 128, 256) if tokens % size == 0]


def _rotaries(codec: Codec, geometry: KVGeometry | None) -> list[Rotary | None]:
    if geometry is not None and geometry.rotary is not None:
        return [geometry.rotary[0]]
    rotated = 64 if codec.planes == 1 else codec.head_dim
    if codec.head_dim < rotated or rotated % 2:
        return [None]
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    return [
        Rotary(tuple((1.0 / base**exponents).tolist()), codec.head_dim, codec.head_dim - rotated, interleaved)
        for base in COMMON_BASES
        for interleaved in (False, True)
    ] + [None]


def judge(
    stored_chunks: Sequence[Tensor] | Tensor, token_ids: Sequence[int], candidates: Sequence[Reading]
) -> list[Verdict]:
    """Judge readings by what lies in layer 0.

    Args:
        stored_chunks: Chunks of one rank in order, as the cache holds them, of a prompt that starts at position 0.
        token_ids: The ids of their tokens, few different ones in an irregular order.
        candidates: Readings to judge.

    Returns:
        A verdict on each.
    """
    # Layer 0 is all that is looked at.
    chunks = [chunk.narrow(-3, 0, 1) for chunk in stored_chunks]
    ids = _Ids(torch.tensor(list(token_ids)))
    floor = _rounding(chunks[0].dtype)
    values: dict[Codec, tuple[Tensor, _Spread | None] | GeometryError] = {}
    verdicts = []
    for reading in candidates:
        codec, rotary = reading.codec, reading.rotary
        if codec not in values:
            values[codec] = _decode(chunks, codec, ids)
        decoded = values[codec]
        if isinstance(decoded, GeometryError):
            verdict = Verdict(reading, accepted=False, reason=str(decoded))
        elif rotary is not None and rotary.head_dim != codec.head_dim:
            reason = f"its rotary positions are of heads of {rotary.head_dim}"
            verdict = Verdict(reading, accepted=False, reason=reason)
        else:
            verdict = _judge(reading, *decoded, ids, floor)
        verdicts.append(verdict)
    return verdicts


def _judge(reading: Reading, keys: Tensor, value: _Spread | None, ids: _Ids, floor: float) -> Verdict:
    value_spread = None if value is None else value.share_of_all
    if value is not None and (difference := value.differs(floor)):
        return Verdict(reading, accepted=False, reason=f"V {difference}", value_spread=value_spread, span=ids.span)
    # Most wrong readings show in one head.
    verdict = _judge_keys(reading, keys[:, :1], ids, floor)
    if verdict.accepted and reading.codec.heads > 1:
        verdict = _judge_keys(reading, keys, ids, floor)
    return replace(verdict, value_spread=value_spread)


def _rounding(dtype: torch.dtype) -> float:
    """Variance of rounding to a dtype, for values of size 1, and of the float32 sums before it."""
    return torch.finfo(dtype).eps ** 2 / 12 + torch.finfo(torch.float32).eps ** 2


def _decode(chunks: Sequence[Tensor], codec: Codec, ids: _Ids) -> tuple[Tensor, _Spread | None] | GeometryError:
    """Keys of layer 0 as `[T, heads, head_dim]` in float64 and the spread of V; or why they cannot be read so."""
    chunk_size = chunks[0].shape[-2]
    if len(chunks) * chunk_size != ids.tokens:
        return GeometryError(f"{len(chunks)} chunks of {chunk_size} tokens do not hold {ids.tokens} tokens")
    out = torch.empty(codec.planes, 1, ids.tokens, codec.width, dtype=chunks[0].dtype)
    of_layer = replace(codec, num_layers=1)
    try:
        for i, chunk in enumerate(chunks):
            of_layer.decode(chunk, out.narrow(2, i * chunk_size, chunk_size))
    except GeometryError as error:
        return error
    by_head = out.view(codec.planes, ids.tokens, codec.heads, codec.head_dim).double()
    if not by_head.isfinite().all():
        return GeometryError("not all values are finite")
    return by_head[0], _spread(by_head[1], ids) if codec.planes == 2 else None


class _Ids:
    """Groups tokens by id."""

    def __init__(self, token_ids: Tensor) -> None:
        self.token_ids = token_ids
        self.tokens = len(token_ids)
        _, self._group = torch.unique(token_ids, return_inverse=True)
        self._count = self._group.bincount()
        positions = torch.arange(self.tokens)
        self.position_deviation = self.within(positions.double()).sqrt().item()
        edges = torch.zeros_like(self._count)
        first = edges.scatter_reduce(0, self._group, positions, "amin", include_self=False)
        last = edges.scatter_reduce(0, self._group, positions, "amax", include_self=False)
        self.span = int((last - first).max())

    def within(self, values: Tensor) -> Tensor:
        """Squared deviation of `[T, ...]` from the mean of its id, averaged over tokens: `[...]`."""
        sums = torch.zeros(len(self._count), *values.shape[1:], dtype=values.dtype).index_add(0, self._group, values)
        means = sums / self._count.view(-1, *[1] * (values.dim() - 1))
        return torch.sub(values, means[self._group]).square().mean(0)


@dataclass(frozen=True, slots=True)
class _Spread:
    """Mean squares of some entries: around the mean of their id, around the mean of all, and of their values."""

    within: float
    all: float
    size: float

    @property
    def share_of_all(self) -> float:
        return math.sqrt(self.within / self.all) if self.all > 0 else math.inf

    def differs(self, floor: float) -> str:
        """Tell why equal ids cannot be said to have equal entries; empty if they have."""
        limit = MARGIN * floor * self.size
        if not self.within <= limit:
            return "differs among equal ids"
        if self.all < 10 * limit:
            return "is too alike for all ids to tell"
        return ""


def _spread(values: Tensor, ids: _Ids) -> _Spread:
    return _Spread(
        within=ids.within(values).mean().item(),
        all=values.var(0, correction=0).mean().item(),
        size=values.square().mean().item(),
    )


def _judge_keys(reading: Reading, keys: Tensor, ids: _Ids, floor: float) -> Verdict:
    rotary = reading.rotary
    reasons = []
    pairs: tuple[float, ...] = ()
    pairs_proven: tuple[bool, ...] = ()
    if rotary is not None:
        if rotary.limit is not None and rotary.limit < ids.tokens:
            ids = _Ids(ids.token_ids[: rotary.limit])
        keys = _undo(keys[: ids.tokens], rotary)
        pairs, limits, pairs_proven = _judge_pairs(keys, rotary, ids, floor)
        wrong = [i for i, (pair, limit) in enumerate(zip(pairs, limits, strict=True)) if not pair <= limit]
        if wrong:
            reasons.append(f"rotary pairs {_ranges(wrong)} differ among equal ids")
        elif not any(pairs_proven):
            reasons.append(f"no rotary pair turns enough over {ids.span} positions")
    still = _without_position(keys, rotary)
    if still.shape[-1] and (difference := _spread(still, ids).differs(floor)):
        reasons.append(f"K{'' if rotary is None else ' without position'} {difference}")
    return Verdict(
        reading,
        accepted=not reasons,
        reason=", ".join(reasons),
        key_spread=_spread(keys, ids).share_of_all,
        pairs=pairs,
        pairs_proven=pairs_proven,
        span=ids.span,
    )


def _undo(keys: Tensor, rotary: Rotary) -> Tensor:
    """Turn keys `[T, heads, head_dim]` back to position 0."""
    positions = torch.arange(keys.shape[0])
    return rerotate_(keys.clone()[None], positions, torch.zeros_like(positions), rotary)[0]


def _without_position(keys: Tensor, rotary: Rotary | None) -> Tensor:
    if rotary is None:
        return keys
    return torch.cat([keys[..., : rotary.offset], keys[..., rotary.offset + rotary.width :]], dim=-1)


def _judge_pairs(
    keys: Tensor, rotary: Rotary, ids: _Ids, floor: float
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[bool, ...]]:
    """For each pair of keys `[T, heads, head_dim]` at position 0: its spread, the most allowed, and if it is proven."""
    rotated = keys[..., rotary.offset : rotary.offset + rotary.width]
    shape, over = ((-1, 2), (0, 2)) if rotary.interleaved else ((2, -1), (0, 1))
    by_pair = rotated.view(*rotated.shape[:-1], *shape)
    within = ids.within(by_pair).mean(over)
    size = by_pair.square().mean(0).mean(over)
    spreads = (within / size).sqrt()

    inv_freq = torch.tensor(rotary.inv_freq, dtype=torch.float64)
    # An engine computes angles in float32; its frequencies may differ from ours in the last bit.
    angle_error = inv_freq * ids.tokens * torch.finfo(torch.float32).eps / 2
    limits = (MARGIN * (floor + angle_error**2)).sqrt()
    wrong_angle = RESOLUTION * inv_freq * ids.position_deviation
    proven = wrong_angle.clamp(max=0.5) > limits
    return tuple(spreads.tolist()), tuple(limits.tolist()), tuple(proven.tolist())
