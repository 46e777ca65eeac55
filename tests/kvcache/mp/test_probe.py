from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lmcache_stream.errors import CacheTimeout, EngineResponseError, GeometryError, UsageError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.codec import Codec, CPUPacked, Fused, Split
from lmcache_stream.kvcache.mp.probe import SPAN, probe, probe_prompt
from lmcache_stream.transfer import TransferExecutor, default_executor
from lmcache_stream.types import PostCompletion, TokenEvent

from .models import CHUNK, codec_of, config_of, geometry_of, kv_of, plain, prompt, rotary_of, stored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from torch import Tensor


def test_the_prompt_has_equal_ids_far_apart_in_whole_chunks_and_one_token_more() -> None:
    for chunk_size in (16, 32, 256, 1024):
        ids = probe_prompt(chunk_size)
        assert len(ids) % chunk_size == 1
        for token_id in set(ids):
            places = [i for i, other in enumerate(ids[:-1]) if other == token_id]
            assert places[-1] - places[0] >= SPAN
            assert len({b - a for a, b in itertools.pairwise(places)}) > 5  # irregular


class Cache:
    """What a probe needs of a context, over KV computed by a model."""

    model_name = "a model"
    chunk_size = CHUNK

    def __init__(self, geometry: KVGeometry | None, ranks: list[list[Tensor]], covered: int | None = None) -> None:
        self.geometry = geometry
        self.ranks = ranks
        self.covered = covered
        self.asked: list[tuple[list[int], str]] = []

    @property
    def executor(self) -> TransferExecutor:
        return default_executor()

    async def wait_for(self, tokens: Sequence[int], *, timeout: float, cache_salt: str = "") -> int:
        self.asked.append((list(tokens), cache_salt))
        return len(tokens) if self.covered is None else self.covered

    async def retrieve_stored(
        self, tokens: Sequence[int], cache_salt: str = "", *, timeout: float | None = None
    ) -> list[list[Tensor]] | None:
        self.asked.append((list(tokens), cache_salt))
        return [chunks[: len(tokens) // CHUNK] for chunks in self.ranks]


class Engine:
    """Takes prompts up to a length."""

    def __init__(self, max_length: int = 10**6) -> None:
        self.max_length = max_length
        self.asked: list[tuple[list[int], dict[str, Any], str]] = []

    async def __call__(
        self, prompt_token_ids: list[int], sampling_params: Mapping[str, Any], cache_salt: str, /
    ) -> AsyncIterator[TokenEvent]:
        self.asked.append((prompt_token_ids, dict(sampling_params), cache_salt))
        if len(prompt_token_ids) >= self.max_length:
            raise EngineResponseError("too long", status=400)

        async def events() -> AsyncIterator[TokenEvent]:
            yield TokenEvent(1)

        return events()


def cache_of(name: str, kind: type[Codec], geometry: KVGeometry | None, dtype: torch.dtype = torch.float32) -> Cache:
    return Cache(geometry, [stored(kv_of(name, dtype), codec_of(kind, geometry_of(name)))])


async def test_probes_an_engine_with_one_request_under_a_scratch_salt() -> None:
    cache, engine = cache_of("llama3", CPUPacked, geometry_of("llama3")), Engine()
    result = await probe(cache, engine)
    ((sent, params, salt),) = engine.asked
    assert sent[:-1] == prompt()
    assert params == {"max_tokens": 1, "temperature": 0}
    assert salt.startswith("probe-")
    assert cache.asked == [(prompt(), salt)] * 2
    assert result.codec == CPUPacked(2, 2, 64, 32)
    assert result.geometry == replace(geometry_of("llama3"), dtype=torch.float32)
    assert result.span >= SPAN
    assert "packing cpu-packed" in result.proven
    assert "2 heads of 64 on each rank" in result.proven
    await probe(cache, engine)
    assert engine.asked[1][2] != salt


async def test_lists_pairs_and_layers_that_it_could_not_prove() -> None:
    geometry = geometry_of("llama")
    rotary = rotary_of(geometry)
    geometry = replace(geometry, rotary=(rotary, None))
    result = await probe(cache_of("llama", Split, geometry, torch.bfloat16), Engine())
    assert result.geometry.rotary == (rotary, None)
    pairs, layers = result.unproven
    assert pairs.startswith("half-split rotary pairs ")
    assert pairs.endswith("-31 of layer 0")
    assert layers == "rotary positions of layers 1, which differ from layer 0's"


@pytest.mark.parametrize("kind", [Split, CPUPacked])
async def test_finds_the_shape_and_layer_0s_rotation_where_nothing_is_known(kind: type[Codec]) -> None:
    result = await probe(cache_of("llama", kind, None), Engine())
    geometry, right = result.geometry, rotary_of(geometry_of("llama"))
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.planes) == (2, 2, 64, 2)
    assert geometry.dtype is torch.float32
    found = result.reading.rotary
    assert found is not None
    assert right is not None
    assert found.inv_freq == pytest.approx(right.inv_freq, rel=1e-6)
    assert "rotary positions of layers 1" in result.unproven
    assert geometry.rotary is None
    assert "from_config" in str(geometry.rotary_unknown)


async def test_a_reason_for_unknown_positions_is_kept() -> None:
    geometry = replace(geometry_of("llama"), rotary=None, rotary_unknown="a regime is needed")
    result = await probe(cache_of("llama", Split, geometry), Engine())
    assert result.geometry == replace(geometry, dtype=torch.float32)


async def test_a_model_with_a_short_context_is_probed_with_a_shorter_prompt() -> None:
    cache, engine = cache_of("llama", Split, geometry_of("llama")), Engine(max_length=600)
    short = probe_prompt(CHUNK, 512)
    kv = kv_of_prompt("llama", short[:-1])
    cache.ranks = [stored(kv, codec_of(Split, geometry_of("llama")))]
    result = await probe(cache, engine)
    assert [len(asked) for asked, _, _ in engine.asked] == [len(probe_prompt(CHUNK, n)) for n in (2048, 1024, 512)]
    assert 512 <= result.span < 600


def kv_of_prompt(name: str, ids: list[int]) -> Tensor:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_of(name)), dtype=torch.float32).eval()
    with torch.no_grad():
        cache = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1).past_key_values
    by_plane = [torch.stack([getattr(layer, plane)[0] for layer in cache.layers]) for plane in ("keys", "values")]
    return torch.stack(by_plane).transpose(2, 3).flatten(3)


async def test_every_rank_must_read_the_same() -> None:
    kv, whole = kv_of("llama", torch.float32), geometry_of("llama")
    geometry = replace(whole, world_size=2)
    codec = CPUPacked(2, 1, 64, 32)
    ranks = [stored(kv[..., :64], codec), stored(kv[..., 64:], codec)]
    result = await probe(Cache(geometry, ranks), Engine())
    assert result.codec == codec
    assert result.geometry.num_kv_heads == 2

    ranks[1] = stored(kv[..., 64:], Fused(2, 1, 64))
    with pytest.raises(GeometryError, match="no reading"):
        await probe(Cache(geometry, ranks), Engine())


async def test_no_reading_fails_with_the_measured_spreads() -> None:
    geometry = geometry_of("llama", rope_parameters=plain(10100.0))
    with pytest.raises(
        GeometryError, match=r"'a model' proves itself.*cpu-packed, 2 x 64.*K 0\.\d+, V 0.*rotary pairs 1-31"
    ):
        await probe(cache_of("llama", CPUPacked, geometry), Engine())


async def test_a_geometry_that_the_chunks_contradict_is_refused() -> None:
    geometry = replace(geometry_of("llama"), dtype=torch.bfloat16)
    with pytest.raises(GeometryError, match=r"holds torch.float32 .*says torch.bfloat16"):
        await probe(cache_of("llama", Split, geometry), Engine())
    three = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=64)
    with pytest.raises(GeometryError, match=r"nothing fits chunks of \[2, 2, 64, 128\]"):
        await probe(cache_of("llama", Split, three), Engine())


async def test_kv_of_whole_numbers_cannot_be_proven() -> None:
    chunks = [torch.zeros(2, 2, CHUNK, 128, dtype=torch.uint8)] * (len(prompt()) // CHUNK)
    with pytest.raises(GeometryError, match=r"torch.uint8"):
        await probe(Cache(None, [chunks]), Engine())


async def test_kv_that_does_not_come_is_a_timeout() -> None:
    cache = cache_of("llama", Split, geometry_of("llama"))
    cache.covered = 128
    with pytest.raises(CacheTimeout, match=r"holds 128 of the probe's .*'a model'"):
        await probe(cache, Engine(), timeout=0.5)


async def test_a_blocking_engine_runs_off_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def engine(prompt_token_ids: list[int], sampling_params: Mapping[str, Any], salt: str) -> Iterator[TokenEvent]:
        threads.append(threading.current_thread())
        yield TokenEvent(1)

    result = await probe(cache_of("llama3", CPUPacked, geometry_of("llama3")), engine)
    assert result.codec.name == "cpu-packed"
    assert threading.current_thread() not in threads
    assert len(threads) == 1


async def test_an_engine_that_gives_nothing_is_refused() -> None:
    nothing = cast("PostCompletion", lambda *_: None)
    with pytest.raises(UsageError, match="must give an iterable of TokenEvent, not NoneType"):
        await probe(cache_of("llama", Split, geometry_of("llama")), nothing)


async def test_an_engine_that_fails_is_heard() -> None:
    with pytest.raises(EngineResponseError, match="too long"):
        await probe(cache_of("llama", Split, geometry_of("llama")), Engine(max_length=0))
