"""What a model's configuration says of its rotation: whether there is one, its parameters, what it turns of a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lmcache_stream.errors import GeometryError
from lmcache_stream.model_config import attention_config, has_alibi, head_size, latent_width, lookup, require

__all__ = ["is_interleaved", "is_rotary", "rope_parameters", "rotated_slice"]

NO_ROTARY: Final = frozenset(
    [
        "biogpt",
        "bloom",
        "codeshell",
        "ctrl",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt-sw3",
        "jamba",
        "mpt",
        "openai-gpt",
        "opt",
        "xglm",
    ]
)
"""Model types whose keys carry no rotation: learned, sinusoidal, ALiBi or no positions."""

INTERLEAVED: Final = frozenset(
    [
        "blt",
        "codegen",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "ernie4_5",
        "ernie4_5_moe",
        "glm",
        "glm4",
        "gptj",
        "helium",
        "llama4_text",
    ]
)
"""Model types that rotate neighbours (0, 1), (2, 3), ... in place; the others rotate the halves of the slice."""

DEFAULT_THETA: Final[Mapping[str, float]] = {
    **dict.fromkeys(
        [
            "codegen",
            "cohere2",
            "deepseek_v2",
            "deepseek_v3",
            "falcon",
            "gemma",
            "gemma2",
            "glm",
            "glm4",
            "glm4_moe",
            "gpt_neox",
            "gptj",
            "granite",
            "llama",
            "mistral",
            "nemotron",
            "olmo",
            "olmo2",
            "olmoe",
            "persimmon",
            "phi",
            "phi3",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "seed_oss",
            "stablelm",
            "starcoder2",
        ],
        10_000.0,
    ),
    **dict.fromkeys(["bitnet", "cohere", "ernie4_5", "ernie4_5_moe", "exaone", "llama4_text", "olmo3"], 500_000.0),
    **dict.fromkeys(["mixtral", "phimoe", "solar_open"], 1_000_000.0),
    "gpt_oss": 150_000.0,
    "helium": 100_000.0,
    "smollm3": 2_000_000.0,
}
"""The rotary base of model types whose configuration may leave it out."""

DEFAULT_PARTIAL: Final[Mapping[str, float]] = {
    **dict.fromkeys(["bamba", "glm", "glm4", "glm4_moe", "nemotron", "persimmon", "phi"], 0.5),
    **dict.fromkeys(["gpt_neox", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "stablelm"], 0.25),
}
"""The rotated share of a head of model types whose configuration may leave it out."""

ROTARY_KEYS: Final = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_dim", "rotary_emb_base", "rotary_pct")


def is_rotary(config: Mapping[str, Any], layer_type: str | None) -> bool:
    """Whether layers of that type have rotary positions.

    Raises:
        GeometryError: Nothing in the configuration tells.
    """
    model_type = config.get("model_type")
    if model_type in NO_ROTARY or has_alibi(config):
        return False
    if config.get("position_embedding_type") in ("absolute", "learned", "learned_absolute", "nope", "sinusoidal"):
        return False
    if model_type in ("cohere2", "cohere2_moe"):
        return layer_type != "full_attention"
    if model_type in ("exaone4", "exaone_moe") and config.get("sliding_window"):
        return layer_type != "full_attention"
    told = any(config.get(key) for key in ROTARY_KEYS) or attention_config(config).get("rope_theta")
    if told or model_type in DEFAULT_THETA or model_type == "gemma3_text":
        return True
    raise GeometryError(
        f"nothing in the configuration of model type {model_type!r} tells its positions: no rope_parameters, "
        "rope_theta or rope_scaling"
    )


def rope_parameters(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any] | None:
    """The parameters of one layer type as one flat mapping, older keys included; None: no rotary positions."""
    model_type = str(config.get("model_type", ""))
    given = config.get("rope_parameters") or {}
    by_type = {key: value for key, value in given.items() if value is None or isinstance(value, Mapping)}
    by_type = {key: value for key, value in by_type.items() if key.endswith("attention") or value is not None}
    if by_type:
        if layer_type is None and len({repr(value) for value in by_type.values()}) == 1:
            layer_type = next(iter(by_type))
        if layer_type not in by_type:
            raise GeometryError(f"rope_parameters differ by layer type: say which of {sorted(by_type)}")
        given = by_type[layer_type]
        if given is None:
            return None
        parameters = dict(given)
    else:
        local = layer_type == "sliding_attention"
        parameters = dict(given or config.get("rope_scaling") or {})
        if not given and local and model_type in ("gemma3_text", "olmo3"):
            parameters = {}
        if not given and model_type == "gemma3_text":
            default = 10_000.0 if local else 1_000_000.0
            theta = config.get("rope_local_base_freq" if local else "rope_theta")
            parameters["rope_theta"] = default if theta is None else theta
    nested = attention_config(config).get("rope_theta")
    if nested is not None:  # transformers writes a default of its own beside it
        parameters["rope_theta"] = nested
    if parameters.get("rope_theta") is None:
        theta = lookup(config, "rope_theta")
        parameters["rope_theta"] = DEFAULT_THETA.get(model_type) if theta is None else theta
    if parameters["rope_theta"] is None:
        require(config, "rope_theta")
    parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    if parameters.get("partial_rotary_factor") is None:
        parameters["partial_rotary_factor"] = lookup(config, "partial_rotary_factor")
    return parameters


def rotated_slice(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[int, int, int]:
    """Head size, where its rotated slice starts, and how wide that slice is."""
    latent = latent_width(config)
    if latent is not None:
        return latent, int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    head_dim = head_size(config)
    rotary_dim = config.get("rotary_dim")
    if rotary_dim is not None:
        return head_dim, 0, int(rotary_dim)
    if parameters["rope_type"] == "proportional":
        return head_dim, 0, head_dim
    partial = parameters["partial_rotary_factor"]
    if partial is None:
        partial = DEFAULT_PARTIAL.get(str(config.get("model_type", "")), 1.0)
    return head_dim, 0, int(head_dim * float(partial))


def is_interleaved(config: Mapping[str, Any]) -> bool:
    """Whether pairs are neighbours; otherwise the halves of the rotated slice."""
    if latent_width(config) is not None:
        return bool(config.get("rope_interleave", True))
    return str(config.get("model_type", "")) in INTERLEAVED
