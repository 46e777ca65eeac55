from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lmcache_stream.engine.model import CausalLM
from lmcache_stream.errors import UsageError

from .client import greedy

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def llama(kv_heads: int = 2, **config: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=kv_heads, **config))


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=256, n_embd=32, n_layer=2, n_head=4))


def qwen2() -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=1, sliding_window=16, use_sliding_window=False))


@pytest.mark.parametrize("make", [llama, gpt2, qwen2])
def test_kv_out_and_in_again_computes_the_same(make: Any) -> None:
    lm = CausalLM(make(), chunk_size=8)
    prompt = list(range(1, 41))
    cache = lm.empty_cache()
    expected = lm.forward(prompt, cache)

    kv = lm.kv(cache, 0, 32)
    geometry = lm.geometry
    assert kv.shape == (2, geometry.num_layers, 32, geometry.num_kv_heads * geometry.head_dim)
    half = lm.cache_from([kv[:, :, at : at + 8] for at in range(0, 32, 8)], 29)
    assert half.get_seq_length() == 29
    torch.testing.assert_close(lm.forward(prompt[29:], half), expected, atol=1e-5, rtol=1e-4)


def test_the_width_of_a_token_is_head_by_head() -> None:
    lm = CausalLM(llama(), chunk_size=8)
    cache = lm.empty_cache()
    lm.forward([1, 2, 3], cache)
    kv = lm.kv(cache, 1, 3)
    for head in range(2):
        assert torch.equal(kv[0, 1, :, head * 8 : head * 8 + 8], cache.layers[1].keys[0, head, 1:3])
        assert torch.equal(kv[1, 1, :, head * 8 : head * 8 + 8], cache.layers[1].values[0, head, 1:3])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_what_goes_out_and_in_is_copied(kv_heads: int) -> None:
    lm = CausalLM(llama(kv_heads), chunk_size=8)
    cache = lm.empty_cache()
    lm.forward(list(range(16)), cache)
    kv = lm.kv(cache, 0, 16)
    untouched = kv.clone()
    overwrite(cache)
    assert torch.equal(kv, untouched)

    again = lm.cache_from([kv], 16)
    overwrite(again)
    assert torch.equal(kv, untouched)
    kv.add_(1)  # a tensor that a user may write to


def overwrite(cache: Any) -> None:
    with torch.inference_mode():
        for layer in cache.layers:
            layer.keys.zero_()
            layer.values.zero_()


def test_without_positions_in_the_configuration_the_longest_context_must_be_given() -> None:
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(UsageError, match="max_model_len"):
        CausalLM(model, chunk_size=8)
    lm = CausalLM(model, chunk_size=8, max_model_len=64)
    assert lm.max_model_len == 64
    cache = lm.empty_cache()
    assert int(lm.forward(list(range(1, 21)), cache).argmax()) == greedy(model, list(range(1, 21)), 1)[0]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=16)), "sliding"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8)), "sliding"),
        (lambda: MambaForCausalLM(MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2)), "Mamba"),
    ],
)
def test_other_than_full_attention_is_refused_by_name(make: Any, kind: str) -> None:
    with pytest.raises(UsageError, match=f"(?i){kind}"):
        CausalLM(make(), chunk_size=8, max_model_len=64)


def test_a_failed_check_gives_the_model_its_attention_back() -> None:
    model = MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=16))
    before = model.config._attn_implementation
    with pytest.raises(UsageError):
        CausalLM(model, chunk_size=8, queries=True)
    assert model.config._attn_implementation == before
