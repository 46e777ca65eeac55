"""Frequencies against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lmcache_stream.errors import GeometryError
from lmcache_stream.rotary import Rotary
from tests.rotary.configs import LLAMA, REFERENCE, SCALINGS, transformers_config


@REFERENCE
@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_scaled_frequencies_equal_those_of_transformers(scaling: dict[str, Any], style: str) -> None:
    given = {**LLAMA, "rope_scaling": scaling}
    config = transformers_config(**given, head_dim=64)
    expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    rotary = Rotary.from_config(given if style == "rope_scaling" else config.to_dict())
    assert rotary is not None
    assert rotary.inv_freq == tuple(expected.tolist())
    assert rotary.head_dim == 64


def test_plain_frequencies_are_powers_of_the_base() -> None:
    rotary = Rotary.from_config(LLAMA)
    assert rotary is not None
    assert rotary.inv_freq == pytest.approx([10000.0 ** (-i / 64) for i in range(0, 64, 2)], rel=1e-6)


def test_yarn_without_a_factor_takes_the_ratio_of_lengths() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    assert Rotary.from_config({**LLAMA, "rope_scaling": scaling}) == Rotary.from_config(
        {**LLAMA, "rope_scaling": {**scaling, "factor": 4.0}}
    )


@pytest.mark.parametrize("regime", ["short", "long"])
def test_longrope_takes_the_factors_of_its_regime(regime: str) -> None:
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


def test_dynamic_ntk_needs_its_engine() -> None:
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


def test_multimodal_positions_are_plain_for_text_only() -> None:
    given = {**LLAMA, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
    with pytest.raises(GeometryError, match="mrope"):
        Rotary.from_config(given)
    assert Rotary.from_config(given, regime="text") == Rotary.from_config(LLAMA)


def test_an_unknown_scaling_and_one_without_its_factor_are_refused() -> None:
    with pytest.raises(GeometryError, match="rope_type 'spiral' is not known"):
        Rotary.from_config({**LLAMA, "rope_scaling": {"rope_type": "spiral"}})
    with pytest.raises(GeometryError, match="needs factor, which is missing"):
        Rotary.from_config({**LLAMA, "rope_scaling": {"rope_type": "linear"}})
