"""What configurations leave out or call by older names, against transformers' defaults."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from lmcache_stream.model_config import DEFAULT_HEAD_DIM, has_alibi, text_config


@pytest.mark.parametrize("model_type", sorted(DEFAULT_HEAD_DIM))
def test_default_head_sizes_are_those_of_transformers(model_type: str) -> None:
    assert AutoConfig.for_model(model_type).head_dim == DEFAULT_HEAD_DIM[model_type]


def test_a_language_model_inside_a_multimodal_one_is_found() -> None:
    inner: dict[str, Any] = {"model_type": "llama", "hidden_size": 256}
    assert text_config({"model_type": "x", "thinker_config": {"text_config": inner}}) is inner


@pytest.mark.parametrize(
    ("config", "alibi"),
    [
        ({"model_type": "mpt"}, True),
        ({"model_type": "mpt", "attn_config": {"clip_qkv": 8}}, True),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, False),
        ({"model_type": "dbrx", "attn_config": {"kv_n_heads": 8, "rope_theta": 500000}}, False),
        ({"model_type": "other", "attn_config": {"alibi": True}}, True),
    ],
)
def test_attention_kept_apart_tells_of_alibi(config: dict[str, Any], alibi: bool) -> None:
    assert has_alibi(config) is alibi
