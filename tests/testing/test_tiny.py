from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_stream.errors import UsageError
from lmcache_stream.testing.tiny import tiny_model as make_tiny_model


def test_the_same_arguments_give_the_same_files(tmp_path: Path) -> None:
    first, second, other = tmp_path / "first", tmp_path / "second", tmp_path / "other"
    torch.manual_seed(1)
    assert make_tiny_model(first) == first
    chance = torch.rand(1)
    torch.manual_seed(1)
    make_tiny_model(second)
    assert torch.rand(1) == chance  # the caller's random state is left alone
    make_tiny_model(other, seed=1)

    names = sorted(file.name for file in first.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    for name in ("model.safetensors", "tokenizer.json"):
        assert (first / name).read_bytes() != (other / name).read_bytes(), name


def test_its_shape(tiny_model: tuple[Any, Any]) -> None:
    model, tokenizer = tiny_model
    config = model.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (2048, 256, 4)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 64)
    assert config.max_position_embeddings == 4096
    assert model.dtype == torch.float32
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert (len(tokenizer), tokenizer.eos_token_id) == (2048, 2)


def test_its_tokenizer_takes_any_text(tiny_model: tuple[Any, Any]) -> None:
    _, tokenizer = tiny_model
    text = "Any text: naïve 🎈\n\tübung 日本."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode(" banana" * 50)) < 200  # words are made of merged tokens


def test_a_continuation_varies_and_depends_on_the_whole_context(tiny_model: tuple[Any, Any]) -> None:
    model, _ = tiny_model
    chance = random.Random(0)
    for length in (64, 200, 400):
        prompt = [chance.randrange(3, 2048) for _ in range(length)]
        whole = continuation(model, prompt)
        assert len(set(whole)) > 16
        for less in (prompt[::2], prompt[: length // 4] + prompt[length * 3 // 4 :]):
            changed = continuation(model, less)
            assert sum(a != b for a, b in zip(whole, changed, strict=True)) > 24


def test_a_vocabulary_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="512"):
        make_tiny_model(tmp_path, vocab_size=100)


def continuation(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, eos_token_id=None
    )
    return [int(token) for token in output[0, len(prompt) :]]
