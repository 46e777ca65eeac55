"""Frequencies against transformers' own, rotation against its models' modules."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lmcache_stream.errors import GeometryError, UsageError
from lmcache_stream.rotary import (
    DEFAULT_PARTIAL,
    DEFAULT_THETA,
    INTERLEAVED,
    NO_ROTARY,
    Rerotation,
    Rotary,
    mean_rotation,
    rerotate,
    rerotate_,
    text_config,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
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


def plain_rotary(head_dim: int = 8, theta: float = 10000.0, **more: Any) -> Rotary:
    return Rotary(tuple(theta ** (-i / head_dim) for i in range(0, head_dim, 2)), head_dim, **more)


def rotated(keys: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Plain float64 rotation of `[L, T, H, head_dim]` by `positions` `[L, H, T]`, one pair at a time."""
    out = keys.double().clone()
    for pair, freq in enumerate(rotary.inv_freq):
        i, j = (2 * pair, 2 * pair + 1) if rotary.interleaved else (pair, pair + len(rotary.inv_freq))
        i, j = i + rotary.offset, j + rotary.offset
        angle = (positions.float() * torch.tensor(freq, dtype=torch.float32)).double().transpose(1, 2)
        a, b = keys[..., i].double(), keys[..., j].double()
        out[..., i] = a * angle.cos() - b * angle.sin()
        out[..., j] = b * angle.cos() + a * angle.sin()
    return out


def transformers_config(model_type: str, **values: Any) -> Any:
    return AutoConfig.for_model(model_type, **values)


class TestFrequencies:
    @pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
    @pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
    def test_scaled_frequencies_equal_those_of_transformers(self, scaling: dict[str, Any], style: str) -> None:
        given = {**LLAMA, "rope_scaling": scaling}
        config = transformers_config(**given, head_dim=64)
        expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
        rotary = Rotary.from_config(given if style == "rope_scaling" else config.to_dict())
        assert rotary is not None
        assert rotary.inv_freq == tuple(expected.tolist())
        assert rotary.head_dim == 64

    def test_plain_frequencies_are_powers_of_the_base(self) -> None:
        rotary = Rotary.from_config(LLAMA)
        assert rotary is not None
        assert rotary.inv_freq == pytest.approx([10000.0 ** (-i / 64) for i in range(0, 64, 2)], rel=1e-6)

    def test_older_type_key_is_read(self) -> None:
        old = Rotary.from_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
        assert old == Rotary.from_config({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
        assert old != Rotary.from_config(LLAMA)

    def test_yarn_without_a_factor_takes_the_ratio_of_lengths(self) -> None:
        scaling = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
        assert Rotary.from_config({**LLAMA, "rope_scaling": scaling}) == Rotary.from_config(
            {**LLAMA, "rope_scaling": {**scaling, "factor": 4.0}}
        )

    @pytest.mark.parametrize("regime", ["short", "long"])
    def test_longrope_takes_the_factors_of_its_regime(self, regime: str) -> None:
        factors = {"short_factor": [1.0 + i / 32 for i in range(32)], "long_factor": [2.0 + i for i in range(32)]}
        scaling = {"rope_type": "longrope", **factors, "original_max_position_embeddings": 1024}
        given = {**LLAMA, "rope_scaling": scaling}
        config = transformers_config(**given, head_dim=64)
        expected, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=4096 if regime == "long" else None)
        rotary = Rotary.from_config(given, regime=regime)
        assert rotary is not None
        assert rotary.inv_freq == tuple(expected.tolist())
        assert rotary.limit == (1024 if regime == "short" else None)
        with pytest.raises(GeometryError, match="longrope has two sets"):
            Rotary.from_config(given)

    def test_dynamic_ntk_needs_its_engine(self) -> None:
        given = {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
        with pytest.raises(GeometryError, match="dynamic NTK rotates differently"):
            Rotary.from_config(given)
        plain, in_transformers = Rotary.from_config(LLAMA), Rotary.from_config(given, regime="transformers")
        assert plain is not None
        assert in_transformers is not None
        assert in_transformers.inv_freq == plain.inv_freq
        assert in_transformers.limit == 4096
        config = transformers_config(**given, head_dim=64)
        fixed, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=2 * 4096)
        in_vllm = Rotary.from_config(given, regime="vllm")
        assert in_vllm is not None
        assert in_vllm.inv_freq == tuple(fixed.tolist())

    def test_multimodal_positions_are_plain_for_text_only(self) -> None:
        given = {**LLAMA, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
        with pytest.raises(GeometryError, match="mrope"):
            Rotary.from_config(given)
        assert Rotary.from_config(given, regime="text") == Rotary.from_config(LLAMA)

    def test_parameters_by_layer_type(self) -> None:
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

    def test_gemma3_reads_alike_from_old_and_new_configurations(self) -> None:
        old: dict[str, Any] = {
            "model_type": "gemma3_text",
            "head_dim": 256,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
        new = transformers_config(**old).to_dict()
        for layer_type in ("full_attention", "sliding_attention"):
            assert Rotary.from_config(old, layer_type) == Rotary.from_config(new, layer_type)

    @pytest.mark.parametrize("model_type", sorted({*DEFAULT_THETA, *DEFAULT_PARTIAL} - {"gptj", "codegen"}))
    def test_defaults_are_those_of_transformers(self, model_type: str) -> None:
        parameters = transformers_config(model_type).to_dict()["rope_parameters"]
        parameters = parameters.get("full_attention", parameters)
        if model_type in DEFAULT_THETA:
            assert DEFAULT_THETA[model_type] == parameters["rope_theta"]
        assert DEFAULT_PARTIAL.get(model_type, 1.0) == parameters.get("partial_rotary_factor", 1.0)

    @pytest.mark.parametrize("model_type", sorted(NO_ROTARY - {"codeshell", "gpt-sw3", "jamba"}))
    def test_models_without_rotary_positions(self, model_type: str) -> None:
        assert Rotary.from_config(transformers_config(model_type).to_dict()) is None

    def test_falcon_rotates_unless_it_has_alibi(self) -> None:
        falcon = transformers_config("falcon").to_dict()
        assert Rotary.from_config({**falcon, "alibi": False}) is not None
        assert Rotary.from_config({**falcon, "alibi": True}) is None

    def test_unknown_is_told_apart_from_none(self) -> None:
        with pytest.raises(GeometryError, match="nothing in the configuration of model type 'brand_new'"):
            Rotary.from_config({"model_type": "brand_new", "hidden_size": 64, "num_attention_heads": 4})
        with pytest.raises(GeometryError, match="rope_type 'spiral' is not known"):
            Rotary.from_config({**LLAMA, "rope_scaling": {"rope_type": "spiral"}})
        with pytest.raises(GeometryError, match="needs factor, which is missing"):
            Rotary.from_config({**LLAMA, "rope_scaling": {"rope_type": "linear"}})
        with pytest.raises(GeometryError, match="hidden_size is missing"):
            Rotary.from_config({"model_type": "llama", "rope_theta": 1e4})

    def test_mla_rotates_the_end_of_its_latent(self) -> None:
        config = transformers_config("deepseek_v3").to_dict()
        rotary = Rotary.from_config(config)
        assert rotary is not None
        assert (rotary.head_dim, rotary.offset, rotary.width, rotary.interleaved) == (576, 512, 64, True)
        halves = Rotary.from_config({**config, "rope_interleave": False})
        assert halves is not None
        assert not halves.interleaved

    def test_a_language_model_inside_a_multimodal_one_is_found(self) -> None:
        assert text_config({"model_type": "x", "thinker_config": {"text_config": LLAMA}}) is LLAMA

    def test_a_slice_outside_its_head_is_refused(self) -> None:
        with pytest.raises(GeometryError, match="does not fit into a head of 8"):
            Rotary((1.0, 0.1), 8, offset=6)


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


class TestAgainstModels:
    @pytest.mark.parametrize("name", sorted(MODULES))
    @pytest.mark.parametrize("largest", [600, 1_000_000])
    def test_moved_keys_equal_freshly_rotated_ones(self, name: str, largest: int) -> None:
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
    def test_interleaved_models_rotate_neighbours(self, model_type: str) -> None:
        modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        assert modeling.rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [-2.0, 1.0, -4.0, 3.0]

    def test_gptj_rotates_neighbours_of_its_rotary_dim(self) -> None:
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


class TestRerotate:
    @settings(deadline=None, max_examples=60)
    @given(data=st.data())
    def test_equals_a_plain_float64_rotation(self, data: st.DataObject) -> None:
        layers, tokens, heads = (data.draw(st.integers(1, 4)) for _ in range(3))
        rotary = plain_rotary(data.draw(st.sampled_from([2, 4, 8])), interleaved=data.draw(st.booleans()), offset=0)
        offset = data.draw(st.integers(0, 3))
        rotary = Rotary(rotary.inv_freq, rotary.head_dim + offset + 1, offset, rotary.interleaved)
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
        raw = torch.randn(layers, tokens, heads, rotary.head_dim, generator=generator, dtype=torch.float64)
        largest = data.draw(st.sampled_from([5, 10_000, 1_000_000]))

        def positions() -> tuple[torch.Tensor, torch.Tensor]:
            shape = data.draw(st.sampled_from([(tokens,), (layers, tokens), (layers, heads, tokens)]))
            drawn = torch.randint(0, largest, shape, generator=generator)
            full = {1: drawn.view(1, 1, -1), 2: drawn.view(layers, 1, -1) if len(shape) == 2 else drawn, 3: drawn}
            return drawn, full[len(shape)].expand(layers, heads, tokens)

        (old, old_full), (new, new_full) = positions(), positions()
        keys = rotated(raw, old_full, rotary)
        moved = rerotate(keys, old, new, rotary)
        torch.testing.assert_close(moved, rotated(raw, new_full, rotary), atol=1e-9, rtol=1e-9)
        flat = rerotate(keys.flatten(-2), old, new, rotary)
        assert torch.equal(flat, moved.flatten(-2))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("by_head", [False, True])
    def test_rounds_once_to_the_dtype_of_the_keys(self, dtype: torch.dtype, by_head: bool) -> None:
        rotary = plain_rotary(64)
        old = torch.arange(2000, 2300)
        new = torch.arange(300)
        if by_head:
            old = old.expand(8, 2, 300)
        raw = torch.randn(8, 300, 2, 64, generator=torch.Generator().manual_seed(1))
        keys = raw.to(dtype)
        exact = rotated(
            rotated(keys, -torch.arange(2000, 2300).expand(8, 2, 300), rotary), new.expand(8, 2, 300), rotary
        )
        moved = rerotate(keys, old, new, rotary)
        eps = torch.finfo(dtype).eps
        assert moved.dtype == dtype
        torch.testing.assert_close(
            moved.double(), exact.to(dtype).double(), atol=2e-6, rtol=0 if dtype == torch.float32 else eps
        )

    def test_layers_of_their_own_rotations(self) -> None:
        keys = torch.randn(4, 5, 2, 8)
        near, far = plain_rotary(8, 100.0), plain_rotary(8, 10000.0)
        old, new = torch.tensor([3, 4, 7, 8, 9]), torch.arange(5)
        moved = rerotate(keys, old, new, (near, None, far, far))
        assert torch.equal(moved[1], keys[1])
        for layer, rotary in ((0, near), (2, far), (3, far)):
            torch.testing.assert_close(moved[layer : layer + 1], rerotate(keys[layer : layer + 1], old, new, rotary))
        by_layer = rerotate(keys, old.expand(4, 5), new, (near, None, far, far))
        torch.testing.assert_close(by_layer, moved, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("shape", [(300,), (4, 300), (4, 2, 300)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_layer_by_layer_is_the_same(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        old = torch.randint(0, 1000, shape, generator=generator)
        keys = torch.randn(4, 300, 2, 64, generator=generator).to(dtype)
        layers = (plain_rotary(64), None, plain_rotary(64, 100.0), plain_rotary(64))
        moved = rerotate(keys, old, torch.arange(300), layers)
        move = Rerotation(old, torch.arange(300), layers)
        for layer in (2, 0, 3, 1):
            move.turn_(keys[layer][None], layer)
        assert torch.equal(keys, moved)

    def test_same_positions_change_nothing(self) -> None:
        keys = torch.randn(2, 6, 16).bfloat16()
        positions = torch.arange(6) + 123_456
        assert torch.equal(rerotate(keys, positions, positions, plain_rotary()), keys)

    def test_the_input_stays_and_the_in_place_form_does_not(self) -> None:
        keys = torch.randn(2, 6, 16)
        before = keys.clone()
        moved = rerotate(keys, torch.arange(6) + 5, torch.arange(6), plain_rotary())
        assert torch.equal(keys, before)
        assert rerotate_(keys, torch.arange(6) + 5, torch.arange(6), plain_rotary()) is keys
        assert torch.equal(keys, moved)

    def test_more_leading_dimensions_share_positions(self) -> None:
        keys = torch.randn(2, 3, 6, 2, 8)
        moved = rerotate(keys, torch.arange(6) + 5, torch.arange(6), plain_rotary())
        assert torch.equal(moved[1], rerotate(keys[1], torch.arange(6) + 5, torch.arange(6), plain_rotary()))

    def test_no_tokens(self) -> None:
        empty = torch.empty(0, dtype=torch.int64)
        assert rerotate(torch.empty(2, 0, 16), empty, empty, plain_rotary()).shape == (2, 0, 16)

    def test_what_does_not_fit_is_refused(self) -> None:
        keys, positions = torch.randn(2, 6, 16), torch.arange(6)
        with pytest.raises(UsageError, match=r"old_positions must be \[6\], \[2, 6\] or \[2, 2, 6\]"):
            rerotate(keys, torch.arange(5), positions, plain_rotary())
        with pytest.raises(UsageError, match="do not divide into heads of 10"):
            rerotate(keys, positions, positions, plain_rotary(10))
        with pytest.raises(UsageError, match="rotary names 3 layers, keys have 2"):
            rerotate(keys, positions, positions, [None] * 3)
        with pytest.raises(UsageError, match="keys must be floating point"):
            rerotate(torch.zeros(6, 16), positions, positions, plain_rotary())
        with pytest.raises(UsageError, match="known up to position 7 only"):
            rerotate(keys, positions + 3, positions, plain_rotary(limit=8))


class TestMeanRotation:
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_is_the_mean_of_the_rotations(self, interleaved: bool) -> None:
        plain = plain_rotary(8, interleaved=interleaved)
        rotary = Rotary(plain.inv_freq, 11, 2, interleaved)
        vector = torch.randn(11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        start, count = 100, 30
        positions = torch.arange(start, start + count)
        turned = rotated(vector.expand(1, count, 1, 11).clone(), positions.view(1, 1, -1), rotary)
        found = mean_rotation(rotary, start, count, torch.device("cpu")) @ vector
        torch.testing.assert_close(found, turned.mean(1).view(-1), atol=1e-12, rtol=1e-12)

    def test_positions_beyond_the_limit_are_refused(self) -> None:
        with pytest.raises(UsageError, match="known up to position 7 only"):
            mean_rotation(plain_rotary(limit=8), 4, 5, torch.device("cpu"))
