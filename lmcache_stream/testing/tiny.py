"""A tiny random language model, made on the spot: for tests that need a real engine but no language."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["tiny_model"]

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
"""Ids 0, 1 and 2: unknown, begin and end of text. A tokenizer of this module adds none of them by itself."""


def tiny_model(
    path: str | Path,
    *,
    seed: int = 0,
    vocab_size: int = 2048,
    hidden_size: int = 256,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    max_position_embeddings: int = 4096,
    initializer_range: float = 0.06,
    attention_sharpness: float = 3.0,
) -> Path:
    """Write a random Qwen3 model in float32 and a byte-level BPE tokenizer to `path`, in seconds.

    The same arguments give the same files. Input and output embeddings are untied, because a tied random model only
    repeats its input, and the weights are large enough that a greedy continuation depends on the whole context.

    Args:
        path: The folder; made if missing, its model files are written over.
        seed: Of the weights and of the text that the tokenizer is trained on.
        vocab_size: Tokens; at least 512 (three special ones, 256 bytes, merges).
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: KV heads; divides `num_heads`.
        head_dim: Values a head.
        max_position_embeddings: Longest context, in tokens.
        initializer_range: Standard deviation of the random weights.
        attention_sharpness: Weight of the query norm: how strongly a head prefers one token over another.

    Returns:
        `path`, ready for `AutoModelForCausalLM.from_pretrained` and as an engine's model folder.

    Raises:
        UsageError: The `engine` extra is not installed, or `vocab_size` is too small.
    """
    try:
        from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        raise UsageError("tiny_model needs transformers: pip install 'lmcache-stream[engine]'") from error
    if vocab_size < 512:
        raise UsageError(f"vocab_size must be at least 512, not {vocab_size}")

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    unknown, begin, end = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(seed, vocab_size),
        unk_token=unknown,
        bos_token=begin,
        eos_token=end,
        model_max_length=max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    sharpen_attention(model, attention_sharpness)
    model.generation_config.do_sample = False
    model.save_pretrained(path)
    return path


def sharpen_attention(model: Any, sharpness: float) -> None:
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(sharpness)


def train_tokenizer(seed: int, vocab_size: int) -> Any:
    """Train a byte-level BPE `tokenizers.Tokenizer` of exactly `vocab_size` tokens on made-up words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(made_up_lines(seed, words=8 * vocab_size), trainer)
    return tokenizer


def made_up_lines(seed: int, *, words: int) -> Iterator[str]:
    chance = random.Random(seed)
    syllables = [first + second for first in "bdfgklmnprstvz" for second in ("a", "e", "i", "o", "u", "en", "ar")]
    for _ in range(words // 12):
        yield " ".join("".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(12)) + "."
