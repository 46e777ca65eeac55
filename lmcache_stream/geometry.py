"""The shape of a model's KV."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmcache_stream.errors import GeometryError
from lmcache_stream.model_config import (
    attention_config,
    has_alibi,
    head_size,
    latent_width,
    lookup,
    require,
    text_config,
)
from lmcache_stream.rotary import Rotary

__all__ = ["KVGeometry"]

ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
KV_HEADS_BY_DEFAULT = frozenset(
    (
        None,
        *("arcee", "biogpt", "bloom", "codegen", "cohere", "cohere2", "falcon", "gpt2", "gpt_neo", "gpt_neox", "gptj"),
        *("granite", "llama", "mpt", "nemotron", "olmo", "olmo2", "olmoe", "opt", "persimmon", "phi", "phi3", "xglm"),
    )
)
"""Model types with as many KV heads as query heads where the configuration does not say."""

DEFAULT_PATTERN = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""Every how many layers one looks at all tokens, where the configuration does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """The shape of a model's KV, over all ranks.

    Args:
        num_layers: Layers, `L`.
        num_kv_heads: KV heads a layer, over all ranks; 1 for MLA.
        head_dim: Values a head; for MLA the width of the latent plane.
        dtype: Type of the stored values; None if not known yet.
        chunk_size: Tokens a cache chunk; None where no cache is meant.
        block_size: Tokens an engine block; None if not known.
        planes: 2 for keys and values, 1 for MLA.
        world_size: Tensor-parallel ranks that share the KV heads.
        num_heads: Query heads a layer, over all ranks; None if not known.
        rotary: For each layer its rotary positions, None for a layer without positions; None: not known.
        rotary_unknown: Why `rotary` is not known, if somebody looked.
        layer_types: For each layer "full_attention", "sliding_attention", ... (the names of `transformers`); None: not
            known.
        alibi: Whether attention is biased by the distance of slots.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype | None = None
    chunk_size: int | None = None
    block_size: int | None = None
    planes: int = 2
    world_size: int = 1
    num_heads: int | None = None
    rotary: tuple[Rotary | None, ...] | None = None
    rotary_unknown: str | None = None
    layer_types: tuple[str, ...] | None = None
    alibi: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "world_size"):
            if getattr(self, name) < 1:
                raise GeometryError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.planes not in (1, 2):
            raise GeometryError(f"planes must be 2 (keys and values) or 1 (MLA), not {self.planes}")
        for name in ("rotary", "layer_types"):
            given = getattr(self, name)
            if given is not None and len(given) != self.num_layers:
                raise GeometryError(f"{name} names {len(given)} layers of {self.num_layers}")

    @property
    def hidden_dim(self) -> int:
        """`D`, the width of one token of one layer and plane: KV heads times head size."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any],
        *,
        dtype: torch.dtype | str | None = None,
        chunk_size: int | None = None,
        block_size: int | None = None,
        world_size: int = 1,
        regime: str | None = None,
    ) -> KVGeometry:
        """Read the geometry from a Hugging Face configuration.

        Unknown rotary positions do not fail here: `rotary` is None then and `rotary_unknown` says why; editors that
        change positions refuse it.

        Args:
            config: Path of a `config.json`, of the folder that holds it, or its content.
            dtype: Type of the stored values, if not the model's own (a `kv_cache_dtype`).
            chunk_size: Tokens a cache chunk.
            block_size: Tokens an engine block.
            world_size: Tensor-parallel ranks.
            regime: Which rotation is meant where the configuration does not tell: see `Rotary.from_config`.

        Raises:
            GeometryError: The file cannot be read, a key is missing, or layers differ in the shape of their KV. The
                message names the file and the key.
        """
        where, given = _read(config)
        text = text_config(given)
        try:
            _refuse_uneven(text)
            num_layers = int(require(text, "num_hidden_layers"))
            latent = latent_width(text)
            num_heads = int(require(text, "num_attention_heads"))
            layer_types = _layer_types(text, num_layers)
            rotary, rotary_unknown = _rotary(text, num_layers, layer_types, regime)
            return cls(
                num_layers=num_layers,
                num_kv_heads=_num_kv_heads(text, num_heads) if latent is None else 1,
                head_dim=latent or head_size(text),
                dtype=_dtype(dtype or text.get("dtype") or text.get("torch_dtype") or given.get("dtype"))
                or _dtype(given.get("torch_dtype")),
                chunk_size=chunk_size,
                block_size=block_size,
                planes=2 if latent is None else 1,
                world_size=world_size,
                num_heads=num_heads,
                rotary=rotary,
                rotary_unknown=rotary_unknown,
                layer_types=layer_types,
                alibi=has_alibi(text),
            )
        except GeometryError as error:
            raise GeometryError(f"{where}: {error}") from None


def _read(config: str | Path | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(config, Mapping):
        return "config", config
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise GeometryError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise GeometryError(f"{path}: must hold a JSON object, not {type(content).__name__}")
    return str(path), content


def _refuse_uneven(config: Mapping[str, Any]) -> None:
    for key in ("num_key_value_heads", "num_kv_heads", "head_dim"):
        if isinstance(config.get(key), list):
            raise GeometryError(f"layers differ in {key}, which one KVGeometry cannot say")
    for key, usual in (("global_head_dim", "head_dim"), ("num_global_key_value_heads", "num_key_value_heads")):
        if config.get(key) not in (None, config.get(usual)):
            raise GeometryError(f"layers differ in their KV ({key}), which one KVGeometry cannot say")
    for key in ("block_configs", "num_kv_shared_layers"):
        if config.get(key):
            raise GeometryError(f"layers differ in their KV ({key}), which one KVGeometry cannot say")


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    model_type = config.get("model_type")
    if model_type == "falcon" and not config.get("new_decoder_architecture"):
        return 1 if config.get("multi_query", True) else num_heads
    if model_type == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else num_heads
    given = attention_config(config).get("kv_n_heads") or lookup(config, "num_key_value_heads")
    if given is None and "num_key_value_heads" not in config and model_type not in KV_HEADS_BY_DEFAULT:
        require(config, "num_key_value_heads")
    return int(given or num_heads)


def _layer_types(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    model_type = str(config.get("model_type", ""))
    given = config.get("layer_types")
    if given:
        other = set(given) - ATTENTION
        if other:
            raise GeometryError(f"layers of type {sorted(other)} keep no keys and values for each token")
        if len(given) != num_layers:
            raise GeometryError(f"layer_types names {len(given)} layers of {num_layers}")
        return tuple(given)
    if any(config.get(key) for key in ("attn_layer_period", "hybrid_override_pattern", "layers_block_type")):
        raise GeometryError("not every layer keeps keys and values for each token")
    if not config.get("sliding_window") or not config.get("use_sliding_window", not model_type.startswith("qwen")):
        return ("full_attention",) * num_layers
    pattern = config.get("sliding_window_pattern", DEFAULT_PATTERN.get(model_type))
    if isinstance(pattern, str):
        return tuple(
            "sliding_attention" if pattern[i % len(pattern)] == "L" else "full_attention" for i in range(num_layers)
        )
    if pattern:
        return tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers))
    first = int(config.get("max_window_layers") or 0) if model_type.startswith("qwen") else 0
    return tuple("sliding_attention" if i >= first else "full_attention" for i in range(num_layers))


def _rotary(
    config: Mapping[str, Any], num_layers: int, layer_types: tuple[str, ...], regime: str | None
) -> tuple[tuple[Rotary | None, ...] | None, str | None]:
    try:
        by_type = {kind: Rotary.from_config(config, kind, regime=regime) for kind in dict.fromkeys(layer_types)}
    except GeometryError as error:
        return None, str(error)
    rotated = _rotated_layers(config, num_layers)
    return tuple(by_type[kind] if on else None for kind, on in zip(layer_types, rotated, strict=True)), None


def _rotated_layers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have rotary positions (SmolLM3 and Llama 4 leave every fourth out)."""
    given = config.get("no_rope_layers")
    if given:
        if len(given) != num_layers:
            raise GeometryError(f"no_rope_layers names {len(given)} layers of {num_layers}")
        return [bool(on) for on in given]
    default = 4 if config.get("model_type") in ("smollm3", "llama4_text") else 0
    interval = int(config.get("no_rope_layer_interval") or default)
    return [not interval or bool((i + 1) % interval) for i in range(num_layers)]


def _dtype(name: Any) -> torch.dtype | None:
    if name is None or isinstance(name, torch.dtype):
        return name
    found = vars(torch).get(str(name).removeprefix("torch."))  # getattr would import what a file names
    if not isinstance(found, torch.dtype):
        raise GeometryError(f"{name!r} names no dtype of torch")
    return found
