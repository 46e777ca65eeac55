"""Configurations of models with rotary positions."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import AutoConfig

REFERENCE = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20),
    reason="this transformers lacks models that it is compared with",
)
"""Tests that need a transformers of about the time of this package."""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
DBRX: dict[str, Any] = {
    "model_type": "dbrx",
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
    "d_model": 6144,
    "max_seq_len": 32768,
    "n_heads": 48,
    "n_layers": 2,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn with betas": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "attention_factor": 1.3,
    },
    "partial yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "partial_rotary_factor": 0.5,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}


def transformers_config(model_type: str, **values: Any) -> Any:
    return AutoConfig.for_model(model_type, **values)
