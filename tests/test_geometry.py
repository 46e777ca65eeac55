"""Geometry from configurations, against what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from lmcache_stream.errors import GeometryError
from lmcache_stream.geometry import KV_HEADS_BY_DEFAULT, KVGeometry
from lmcache_stream.rotary import Rotary
from tests.rotary.configs import DBRX

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 4096,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}


def test_a_plain_configuration() -> None:
    geometry = KVGeometry.from_config(QWEN3_8B, chunk_size=256, block_size=16, world_size=2)
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.num_heads) == (36, 8, 128, 32)
    assert (geometry.hidden_dim, geometry.planes, geometry.world_size) == (1024, 2, 2)
    assert (geometry.chunk_size, geometry.block_size, geometry.dtype) == (256, 16, torch.bfloat16)
    assert geometry.layer_types == ("full_attention",) * 36
    assert geometry.rotary == (Rotary.from_config(QWEN3_8B),) * 36
    assert geometry.rotary_unknown is None
    assert not geometry.alibi


@pytest.mark.parametrize("given", ["folder", "file", "string"])
def test_a_path_is_read(tmp_path: Path, given: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    path: Path | str = tmp_path if given == "folder" else tmp_path / "config.json"
    assert KVGeometry.from_config(str(path) if given == "string" else path) == KVGeometry.from_config(QWEN3_8B)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(GeometryError, match=r"config\.json: cannot be read"):
        KVGeometry.from_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(GeometryError, match=r"config\.json: must hold a JSON object, not list"):
        KVGeometry.from_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(GeometryError, match=r"config\.json: num_hidden_layers is missing"):
        KVGeometry.from_config(tmp_path)


@pytest.mark.parametrize(
    "model_type",
    [
        "codegen",
        "cohere",
        "cohere2",
        "deepseek_v3",
        "ernie4_5",
        "exaone4",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granite",
        "helium",
        "llama",
        "llama4_text",
        "mistral",
        "mixtral",
        "olmo3",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "stablelm",
        "starcoder2",
    ],
)
def test_whole_configurations_of_transformers(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    geometry = KVGeometry.from_config(config.to_dict())
    assert geometry.num_layers == config.num_hidden_layers
    assert geometry.num_heads == config.num_attention_heads
    assert geometry.rotary_unknown is None
    assert geometry.rotary is not None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        assert geometry.layer_types == tuple(layer_types)
    if model_type == "deepseek_v3":
        assert (geometry.planes, geometry.num_kv_heads, geometry.head_dim) == (1, 1, 512 + 64)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert (geometry.planes, geometry.head_dim) == (2, head_dim)
    if model_type in ("falcon", "gpt_bigcode"):
        assert geometry.num_kv_heads == 1
    else:
        assert geometry.num_kv_heads == getattr(config, "num_key_value_heads", None) or config.num_attention_heads


@pytest.mark.parametrize("model_type", sorted(name for name in KV_HEADS_BY_DEFAULT if name))
def test_default_kv_heads_are_those_of_transformers(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, num_attention_heads=6, hidden_size=6 * 16).to_dict()
    assert config.get("num_key_value_heads") in (None, 6)


def test_kv_heads_are_not_guessed() -> None:
    given = {key: value for key, value in QWEN3_8B.items() if key != "num_key_value_heads"}
    with pytest.raises(
        GeometryError, match="num_key_value_heads is missing in the configuration of model type 'qwen3'"
    ):
        KVGeometry.from_config(given)
    assert KVGeometry.from_config({**given, "num_key_value_heads": None}).num_kv_heads == 32


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "gemma2", "cohere2", "gemma3_text", "starcoder2"])
def test_sliding_layers_of_old_configurations(model_type: str) -> None:
    given: dict[str, Any] = {
        **{key: QWEN3_8B[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")},
        "model_type": model_type,
        "num_hidden_layers": 14,
        "sliding_window": 128,
    }
    if model_type == "qwen2":
        given |= {"use_sliding_window": True, "max_window_layers": 3}
    config = AutoConfig.for_model(**given)
    geometry = KVGeometry.from_config(given)
    new = KVGeometry.from_config(config.to_dict())
    assert geometry.layer_types is not None
    assert set(geometry.layer_types) > {"sliding_attention"} or model_type in ("mistral", "starcoder2")
    assert geometry.rotary == new.rotary
    if getattr(config, "layer_types", None):
        assert geometry.layer_types == tuple(config.layer_types)


def test_qwen_does_not_slide_unless_it_says_so() -> None:
    geometry = KVGeometry.from_config({**QWEN3_8B, "sliding_window": 4096})
    assert geometry.layer_types == ("full_attention",) * 36


def test_layers_without_positions() -> None:
    smollm3 = KVGeometry.from_config(AutoConfig.for_model("smollm3", num_hidden_layers=8).to_dict())
    assert smollm3.rotary is not None
    assert [rotary is None for rotary in smollm3.rotary] == [False, False, False, True] * 2
    cohere2 = KVGeometry.from_config(AutoConfig.for_model("cohere2", num_hidden_layers=8).to_dict())
    assert cohere2.rotary is not None
    assert [rotary is None for rotary in cohere2.rotary] == [False, False, False, True] * 2
    listed = KVGeometry.from_config({**QWEN3_8B, "num_hidden_layers": 2, "no_rope_layers": [0, 1]})
    assert listed.rotary is not None
    assert [rotary is None for rotary in listed.rotary] == [True, False]


def test_alibi_is_told() -> None:
    assert KVGeometry.from_config(AutoConfig.for_model("bloom").to_dict()).alibi
    assert KVGeometry.from_config({**AutoConfig.for_model("falcon").to_dict(), "alibi": True}).alibi
    assert not KVGeometry.from_config(AutoConfig.for_model("gpt2").to_dict()).alibi


def test_heads_and_rotation_that_stand_with_the_attention() -> None:
    geometry = KVGeometry.from_config(DBRX)
    assert (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim) == (48, 8, 128)
    assert geometry.rotary == (Rotary.from_config(DBRX),) * 2
    assert not geometry.alibi


def test_unknown_rotary_does_not_fail_but_says_why() -> None:
    geometry = KVGeometry.from_config({**QWEN3_8B, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    assert geometry.rotary is None
    assert geometry.rotary_unknown is not None
    assert "dynamic NTK" in geometry.rotary_unknown
    known = KVGeometry.from_config({**QWEN3_8B, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, regime="vllm")
    assert known.rotary is not None


def test_the_language_model_of_a_multimodal_one() -> None:
    geometry = KVGeometry.from_config({"model_type": "some_vl", "dtype": "float16", "text_config": QWEN3_8B})
    assert geometry.num_layers == 36
    assert geometry.dtype == torch.bfloat16
    outer = {key: value for key, value in QWEN3_8B.items() if key != "torch_dtype"}
    assert KVGeometry.from_config({"dtype": "float16", "text_config": outer}).dtype == torch.float16
    assert KVGeometry.from_config(outer).dtype is None


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "torch.float8_e4m3fn", torch.float8_e4m3fn])
def test_a_given_dtype_wins(dtype: Any) -> None:
    assert KVGeometry.from_config(QWEN3_8B, dtype=dtype).dtype == torch.float8_e4m3fn
    with pytest.raises(GeometryError, match="'fp8' names no dtype"):
        KVGeometry.from_config(QWEN3_8B, dtype="fp8")


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"layer_types": ["linear_attention"] * 36}, "linear_attention"),
        ({"num_key_value_heads": [1, 2]}, "num_key_value_heads"),
        ({"global_head_dim": 256}, "global_head_dim"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"block_configs": [{}]}, "block_configs"),
        ({"attn_layer_period": 8}, "not every layer"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers of 36"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers names 2 layers of 36"),
    ],
)
def test_what_one_geometry_cannot_say_is_refused(more: dict[str, Any], match: str) -> None:
    with pytest.raises(GeometryError, match=match):
        KVGeometry.from_config({**QWEN3_8B, **more})


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(GeometryError, match="num_layers must be at least 1"):
        KVGeometry(num_layers=0, num_kv_heads=1, head_dim=1)
    with pytest.raises(GeometryError, match="planes must be 2"):
        KVGeometry(num_layers=1, num_kv_heads=1, head_dim=1, planes=3)
    with pytest.raises(GeometryError, match="rotary names 2 layers of 1"):
        KVGeometry(num_layers=1, num_kv_heads=1, head_dim=1, rotary=(None, None))
