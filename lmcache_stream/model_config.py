"""A model's configuration: what a Hugging Face `config.json` says, by older names and defaults of model types, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lmcache_stream.errors import GeometryError

__all__ = ["attention_config", "has_alibi", "head_size", "latent_width", "lookup", "require", "text_config"]

ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "hidden_size": ("n_embd", "d_model"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "rope_theta": ("rotary_emb_base",),
    "partial_rotary_factor": ("rotary_pct",),
}
"""Older names of keys in a Hugging Face configuration."""

DEFAULT_HEAD_DIM: Final[Mapping[str, int]] = {
    **dict.fromkeys(["gpt_oss"], 64),
    **dict.fromkeys(["ernie4_5", "glm", "glm4", "helium", "llama4_text", "qwen3", "seed_oss", "solar_open"], 128),
    **dict.fromkeys(["gemma", "gemma2", "gemma3_text", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"], 256),
}
"""The head size of model types whose configuration may leave it out, where it is not hidden size by heads."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the language model's part of a possibly multimodal Hugging Face configuration."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        nested = config.get(key)
        if isinstance(nested, Mapping) and nested:
            return text_config(nested)
    return config


def latent_width(config: Mapping[str, Any]) -> int | None:
    """Width of the latent plane of multi-head latent attention (MLA: latent, then rotated slice); None without MLA."""
    if config.get("kv_lora_rank") is None or config.get("qk_rope_head_dim") is None:
        return None
    if config.get("model_type") == "minicpm3":
        raise GeometryError("minicpm3 caches expanded heads, not the latent of its MLA: give a KVGeometry by hand")
    return int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])


def attention_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part on attention, which MPT and DBRX keep apart; empty elsewhere."""
    nested = config.get("attn_config")
    return nested if isinstance(nested, Mapping) else {}


def has_alibi(config: Mapping[str, Any]) -> bool:
    """Whether attention is biased by the distance of slots (ALiBi), so that a cache's order matters."""
    model_type = config.get("model_type")
    return (
        bool(attention_config(config).get("alibi", model_type == "mpt"))
        or model_type == "bloom"
        or bool(config.get("alibi"))
        or config.get("position_embedding_type") == "alibi"
    )


def head_size(config: Mapping[str, Any]) -> int:
    """Values a head, without MLA."""
    given = config.get("head_dim", DEFAULT_HEAD_DIM.get(str(config.get("model_type", ""))))
    if given is not None:
        return int(given)
    return int(require(config, "hidden_size")) // int(require(config, "num_attention_heads"))


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Value of `key` or of one of its older names; None if there is none."""
    return next((config[name] for name in (key, *ALIASES.get(key, ())) if config.get(name) is not None), None)


def require(config: Mapping[str, Any], key: str) -> Any:
    """Like `lookup`, but raises `GeometryError` naming the key."""
    value = lookup(config, key)
    if value is None:
        model_type = config.get("model_type", "unnamed")
        raise GeometryError(
            f"{key} is missing in the configuration of model type {model_type!r}; if transformers knows its default, "
            "pass AutoConfig.from_pretrained(...).to_dict()"
        )
    return value
