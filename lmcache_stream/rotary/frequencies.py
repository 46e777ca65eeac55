"""The inverse frequencies of a rotation, by its scaling: default, linear, llama3, yarn, dynamic, longrope, ..."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from lmcache_stream.errors import GeometryError
from lmcache_stream.model_config import require

__all__ = ["inverse_frequencies"]


def inverse_frequencies(
    config: Mapping[str, Any], parameters: Mapping[str, Any], dim: int, head_dim: int, regime: str | None
) -> tuple[torch.Tensor, int | None]:
    """Inverse frequencies, float32 `[dim / 2]`, and the first position at which they no longer hold."""
    rope_type = str(parameters["rope_type"])
    theta = float(parameters["rope_theta"])
    if ("mrope_section" in parameters or rope_type == "mrope") and regime != "text":
        raise GeometryError(
            'multimodal rotary positions (mrope) are plain only for text: pass regime="text" if no prompt holds images'
        )
    match rope_type:
        case "default" | "mrope":
            return _plain(theta, dim), None
        case "linear":
            return _plain(theta, dim) / float(_need(parameters, "factor")), None
        case "llama3":
            return _llama3(config, parameters, _plain(theta, dim)), None
        case "yarn" | "deepseek_yarn":
            return _yarn(config, parameters, theta, dim), None
        case "dynamic":
            return _dynamic(config, parameters, theta, dim, regime)
        case "longrope" | "su":
            return _longrope(config, parameters, theta, dim, regime)
        case "proportional":
            return _proportional(parameters, theta, head_dim), None
    raise GeometryError(f"rope_type {rope_type!r} is not known")


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _need(parameters: Mapping[str, Any], key: str) -> Any:
    if parameters.get(key) is None:
        raise GeometryError(f"rope_type {parameters['rope_type']!r} needs {key}, which is missing")
    return parameters[key]


def _original_length(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    return int(original or require(config, "max_position_embeddings"))


def _llama3(config: Mapping[str, Any], parameters: Mapping[str, Any], inv_freq: torch.Tensor) -> torch.Tensor:
    factor = float(_need(parameters, "factor"))
    low, high = float(_need(parameters, "low_freq_factor")), float(_need(parameters, "high_freq_factor"))
    length = _original_length(config, parameters)
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > length / low, inv_freq / factor, inv_freq)
    smooth = (length / wavelength - low) / (high - low)
    between = (wavelength >= length / high) & (wavelength <= length / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn(config: Mapping[str, Any], parameters: Mapping[str, Any], theta: float, dim: int) -> torch.Tensor:
    length = _original_length(config, parameters)
    factor = float(parameters.get("factor") or require(config, "max_position_embeddings") / length)

    def pair_that_turns(times: float) -> float:
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_that_turns(float(parameters.get("beta_fast") or 32))
    last = pair_that_turns(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    wavelength = theta ** (torch.arange(0, dim, 2).float() / dim)
    kept = 1 - interpolated
    return 1.0 / (factor * wavelength) * (1 - kept) + 1.0 / wavelength * kept


def _dynamic(
    config: Mapping[str, Any], parameters: Mapping[str, Any], theta: float, dim: int, regime: str | None
) -> tuple[torch.Tensor, int | None]:
    if parameters.get("alpha") is not None:
        return _plain(theta * float(parameters["alpha"]) ** (dim / (dim - 2)), dim), None
    if regime == "transformers":
        return _plain(theta, dim), int(require(config, "max_position_embeddings"))
    if regime == "vllm":
        factor = float(_need(parameters, "factor"))
        return _plain(theta * (factor * factor - (factor - 1)) ** (dim / (dim - 2)), dim), None
    raise GeometryError(
        'dynamic NTK rotates differently by engine: pass regime="vllm" or regime="transformers" (up to the original '
        "length only)"
    )


def _longrope(
    config: Mapping[str, Any], parameters: Mapping[str, Any], theta: float, dim: int, regime: str | None
) -> tuple[torch.Tensor, int | None]:
    if regime not in ("short", "long"):
        raise GeometryError('longrope has two sets of factors: pass regime="short" or regime="long"')
    factors = torch.tensor(_need(parameters, f"{regime}_factor"), dtype=torch.float32)
    if factors.numel() != dim // 2:
        raise GeometryError(f"longrope needs {dim // 2} {regime} factors, not {factors.numel()}")
    limit = _original_length(config, parameters) if regime == "short" else None
    return 1.0 / (factors * theta ** (torch.arange(0, dim, 2).float() / dim)), limit


def _proportional(parameters: Mapping[str, Any], theta: float, head_dim: int) -> torch.Tensor:
    pairs = int(float(parameters["partial_rotary_factor"] or 1.0) * head_dim // 2)
    inv_freq = torch.zeros(head_dim // 2)
    inv_freq[:pairs] = 1.0 / (theta ** (torch.arange(0, 2 * pairs, 2, dtype=torch.float32) / head_dim))
    return inv_freq / float(parameters.get("factor") or 1.0)
