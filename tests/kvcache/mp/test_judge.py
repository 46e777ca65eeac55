from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.codec import Codec, CPUPacked, Fused, Latent, Split
from lmcache_stream.kvcache.mp.judge import RESOLUTION, judge
from lmcache_stream.kvcache.mp.probe import SPAN
from lmcache_stream.kvcache.mp.readings import Reading, readings
from lmcache_stream.rotary import Rotary, rerotate_

from .models import CHUNK, LLAMA3, MODELS, YARN, codec_of, geometry_of, kv_of, plain, prompt, rotary_of, stored

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

RECORDED = Path(__file__).parents[2] / "data" / "kv" / "vllm-cpu-packed.safetensors"


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
