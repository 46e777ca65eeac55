"""What models of many kinds keep for the probe's prompt, and the chunks that a cache would hold of it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lmcache_stream.geometry import KVGeometry
from lmcache_stream.kvcache.mp.codec import Codec
from lmcache_stream.kvcache.mp.probe import probe_prompt
from lmcache_stream.rotary import Rotary

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 64
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
