"""What configurations say of a rotation, old and new ones, against transformers' defaults."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_stream.errors import GeometryError
from lmcache_stream.rotary import Rotary
from lmcache_stream.rotary.parameters import DEFAULT_PARTIAL, DEFAULT_THETA, NO_ROTARY
from tests.rotary.configs import DBRX, LLAMA, REFERENCE, transformers_config


def test_older_type_key_is_read() -> None:
    old = Rotary.from_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert old == Rotary.from_config({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
    assert old != Rotary.from_config(LLAMA)


def test_parameters_by_layer_type() -> None:
    by_type = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "chunked_attention": None,
    }
    given = {**LLAMA, "rope_parameters": by_type}
    assert Rotary.from_config(given, "sliding_attention") == Rotary.from_config(LLAMA)
    full = Rotary.from_config(given, "full_attention")
    assert full is not None
    assert full.inv_freq[0] == 1 / 8
    assert Rotary.from_config(given, "chunked_attention") is None
    with pytest.raises(GeometryError, match=r"differ by layer type.*full_attention"):
        Rotary.from_config(given)


def test_gemma3_reads_alike_from_old_and_new_configurations() -> None:
    old: dict[str, Any] = {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = transformers_config(**old).to_dict()
    for layer_type in ("full_attention", "sliding_attention"):
        assert Rotary.from_config(old, layer_type) == Rotary.from_config(new, layer_type)


@REFERENCE
@pytest.mark.parametrize("model_type", sorted({*DEFAULT_THETA, *DEFAULT_PARTIAL} - {"gptj", "codegen"}))
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    parameters = transformers_config(model_type).to_dict()["rope_parameters"]
    parameters = parameters.get("full_attention", parameters)
    if model_type in DEFAULT_THETA:
        assert DEFAULT_THETA[model_type] == parameters["rope_theta"]
    assert DEFAULT_PARTIAL.get(model_type, 1.0) == parameters.get("partial_rotary_factor", 1.0)


@pytest.mark.parametrize("model_type", sorted(NO_ROTARY - {"codeshell", "gpt-sw3", "jamba"}))
def test_models_without_rotary_positions(model_type: str) -> None:
    assert Rotary.from_config(transformers_config(model_type).to_dict()) is None


def test_falcon_rotates_unless_it_has_alibi() -> None:
    falcon = transformers_config("falcon").to_dict()
    assert Rotary.from_config({**falcon, "alibi": False}) is not None
    assert Rotary.from_config({**falcon, "alibi": True}) is None


def test_dbrx_says_its_base_with_its_attention() -> None:
    expected = Rotary.from_config({**LLAMA, "head_dim": 128, "rope_theta": 500000.0})
    assert Rotary.from_config(DBRX) == expected
    assert Rotary.from_config(transformers_config(**DBRX).to_dict()) == expected
    without = {**DBRX, "attn_config": {"kv_n_heads": 8}}
    assert Rotary.from_config({**without, "rope_theta": 500000.0}) == expected
    with pytest.raises(GeometryError, match="model type 'dbrx' tells its positions"):
        Rotary.from_config(without)


def test_unknown_is_told_apart_from_none() -> None:
    with pytest.raises(GeometryError, match="nothing in the configuration of model type 'brand_new'"):
        Rotary.from_config({"model_type": "brand_new", "hidden_size": 64, "num_attention_heads": 4})
    with pytest.raises(GeometryError, match="hidden_size is missing"):
        Rotary.from_config({"model_type": "llama", "rope_theta": 1e4})


def test_mla_rotates_the_end_of_its_latent() -> None:
    config = transformers_config("deepseek_v3").to_dict()
    rotary = Rotary.from_config(config)
    assert rotary is not None
    assert (rotary.head_dim, rotary.offset, rotary.width, rotary.interleaved) == (576, 512, 64, True)
    halves = Rotary.from_config({**config, "rope_interleave": False})
    assert halves is not None
    assert not halves.interleaved


def test_a_slice_outside_its_head_is_refused() -> None:
    with pytest.raises(GeometryError, match="does not fit into a head of 8"):
        Rotary((1.0, 0.1), 8, offset=6)
