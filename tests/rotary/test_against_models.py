"""Rotation against the modules of transformers' models."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from lmcache_stream.rotary import Rotary, rerotate
from lmcache_stream.rotary.parameters import INTERLEAVED
from tests.rotary.configs import LLAMA, REFERENCE, SCALINGS, transformers_config

MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaRotaryEmbedding", {}),
    "qwen3": ("Qwen3RotaryEmbedding", {"rope_theta": 1e6, "head_dim": 64}),
    "glm": ("GlmRotaryEmbedding", {"head_dim": 64}),
    "glm4": ("Glm4RotaryEmbedding", {"head_dim": 64}),
    "phi": ("PhiRotaryEmbedding", {}),
    "phi3": ("Phi3RotaryEmbedding", {"partial_rotary_factor": 0.75, "pad_token_id": 0}),
    "gpt_neox": ("GPTNeoXRotaryEmbedding", {}),
    "stablelm": ("StableLmRotaryEmbedding", {}),
    "cohere": ("CohereRotaryEmbedding", {}),
    "ernie4_5": ("Ernie4_5RotaryEmbedding", {"head_dim": 64}),
    "llama3": ("LlamaRotaryEmbedding", {"rope_scaling": SCALINGS["llama3"]}),
    "yarn": ("LlamaRotaryEmbedding", {"rope_scaling": SCALINGS["yarn"]}),
}


@pytest.mark.parametrize("name", sorted(MODULES))
@pytest.mark.parametrize("largest", [600, 1_000_000])
def test_moved_keys_equal_freshly_rotated_ones(name: str, largest: int) -> None:
    class_name, values = MODULES[name]
    model_type = "llama" if name in ("llama3", "yarn") else name
    shape = {key: LLAMA[key] for key in LLAMA if key not in ("model_type", "rope_theta")}
    config = transformers_config(model_type, **{**shape, **values})
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    embedding = getattr(modeling, class_name)(config)
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(1, 3, 40, 64, generator=generator)
    old = torch.randperm(largest, generator=generator)[:40].sort().values
    new = torch.arange(40)

    def in_transformers(positions: torch.Tensor) -> torch.Tensor:
        cos, sin = embedding(raw, positions[None])
        width = cos.shape[-1]
        if model_type in ("phi", "stablelm"):
            turned = modeling.apply_rotary_pos_emb(raw[..., :width], raw[..., :width], cos, sin)[1]
            turned = torch.cat([turned, raw[..., width:]], dim=-1)
        else:
            turned = modeling.apply_rotary_pos_emb(raw, raw, cos, sin)[1]
        assert isinstance(turned, torch.Tensor)
        return turned.transpose(1, 2)

    rotary = Rotary.from_config(config.to_dict())
    assert rotary is not None
    before, after = in_transformers(old), in_transformers(new)
    assert not torch.allclose(before, after, atol=1e-2)
    torch.testing.assert_close(rerotate(before, old, new, rotary), after, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("model_type", sorted(INTERLEAVED - {"llama4_text", "gptj", "codegen", "cohere2_moe"}))
def test_interleaved_models_rotate_neighbours(model_type: str) -> None:
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    assert modeling.rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [-2.0, 1.0, -4.0, 3.0]


@REFERENCE
def test_gptj_rotates_neighbours_of_its_rotary_dim() -> None:
    from transformers.models.gptj import modeling_gptj

    config = transformers_config("gptj", n_embd=64, n_head=4, rotary_dim=8)
    rotary = Rotary.from_config(config.to_dict())
    assert rotary is not None
    assert (rotary.head_dim, rotary.width, rotary.interleaved) == (16, 8, True)
    raw = torch.randn(1, 6, 4, 16)
    positions = torch.arange(6)
    sin, cos = modeling_gptj.GPTJRotaryEmbedding(config)(raw, positions[None])
    expected = torch.cat([modeling_gptj.apply_rotary_pos_emb(raw[..., :8], sin, cos), raw[..., 8:]], dim=-1)
    moved = rerotate(raw, torch.zeros(6, dtype=torch.int64), positions, rotary)
    torch.testing.assert_close(moved, expected, atol=1e-6, rtol=1e-6)
