from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_stream.bench.config import load_options
from lmcache_stream.bench.datasets import Sample, check_lengths, digest, load_samples
from lmcache_stream.bench.place import LocalTokenizer
from lmcache_stream.errors import UsageError


class Words:
    """A tokenizer of words; ids under 10 are special, and "7 7" reads back as one token."""

    exact = True
    name = "words"
    vocab_size = 100
    num_special = 1

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        ids = [int(word) if word.isdecimal() else 10 + len(word) for word in text.replace("77 77", "77").split()]
        return [0, *ids] if special_tokens else ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def plain_ids(self) -> list[int]:
        return list(range(10, 100))

    def chat(self, text: str) -> str:
        return f"user {text}"


def samples(tokenizer: Any = None, **given: Any) -> list[Sample]:
    return load_samples(load_options(environ={}, **given), tokenizer or Words())


class TestRandom:
    def test_is_the_same_for_a_seed(self) -> None:
        first = samples(num_prompts=5, random_input_len=20, seed=1)
        assert digest(first) == digest(samples(num_prompts=5, random_input_len=20, seed=1))
        assert digest(first) != digest(samples(num_prompts=5, random_input_len=20, seed=2))

    def test_is_that_of_vllm_bench_serve(self) -> None:
        """Lengths, then offsets, from one generator; runs of consecutive plain ids."""
        made = samples(num_prompts=4, random_input_len=21, random_output_len=10, random_range_ratio=0.5, seed=3)
        rng = np.random.default_rng(3)
        input_lens = rng.integers(10, 31, size=4)
        output_lens = rng.integers(5, 16, size=4)
        offsets = rng.integers(0, 100, size=4)
        assert [sample.output_len for sample in made] == output_lens.tolist()
        for index, sample in enumerate(made):
            run = [int(10 + (offsets[index] + index + step) % 90) for step in range(input_lens[index])]
            assert sample.prompt_token_ids == [0, *run]

    def test_a_prefix_is_common(self) -> None:
        made = samples(num_prompts=6, random_input_len=20, random_prefix_len=8)
        assert len({tuple(sample.prompt_token_ids[:9]) for sample in made}) == 1
        assert len({tuple(sample.prompt_token_ids) for sample in made}) == 6
        assert {len(sample.prompt_token_ids) for sample in made} == {1 + 8 + 19}

    def test_lengths_of_a_real_tokenizer(self, tiny_model: tuple[Any, Any]) -> None:
        tokenizer = LocalTokenizer(tiny_model[1], "tiny")
        made = samples(tokenizer, num_prompts=8, random_input_len=64, random_output_len=16)
        assert all(64 <= len(sample.prompt_token_ids) <= 66 for sample in made)
        assert {sample.output_len for sample in made} == {16}

    def test_an_empty_prompt_is_refused(self) -> None:
        with pytest.raises(UsageError, match="--random-input-len"):
            samples(random_input_len=1)


class TestPrefixRepetition:
    def test_groups_share_their_prefix(self) -> None:
        made = samples(
            dataset_name="prefix_repetition",
            num_prompts=13,
            prefix_repetition_num_prefixes=3,
            prefix_repetition_prefix_len=30,
            prefix_repetition_suffix_len=5,
        )
        assert len(made) == 12
        groups: dict[tuple[int, ...], int] = {}
        for sample in made:
            head = tuple(sample.prompt_token_ids[:20])
            groups[head] = groups.get(head, 0) + 1
        assert sorted(groups.values()) == [4, 4, 4]

    def test_fewer_prompts_than_prefixes(self) -> None:
        with pytest.raises(UsageError, match="--num-prompts 3"):
            samples(dataset_name="prefix_repetition", num_prompts=3)


class TestShareGPT:
    def file(self, tmp_path: Path, pairs: Sequence[tuple[str, str]]) -> Path:
        path = tmp_path / "sharegpt.json"
        rows = [
            {"id": "x", "conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]} for a, b in pairs
        ]
        path.write_text(json.dumps([*rows, {"conversations": [{"value": "alone"}]}, {}]))
        return path

    def test_prompt_and_length_of_the_answer(self, tmp_path: Path) -> None:
        pairs = [(" ".join(["a"] * (5 + index)), " ".join(["b"] * (7 + index))) for index in range(4)]
        path = self.file(
            tmp_path, [*pairs, ("a b", "too short a prompt here"), ("a b c d e", "b"), ("a " * 1025, "b " * 9)]
        )
        made = samples(dataset_name="sharegpt", dataset_path=path, num_prompts=4)
        assert sorted((len(one.prompt_token_ids), one.output_len) for one in made) == [(6, 8), (7, 9), (8, 10), (9, 11)]

    def test_is_drawn_again_when_there_are_too_few(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, [("a b c d e", "b c d e f")])
        made = samples(dataset_name="sharegpt", dataset_path=path, num_prompts=3, sharegpt_output_len=2)
        assert made == [Sample([0, 11, 11, 11, 11, 11], 2)] * 3

    def test_nothing_that_fits(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, [("a", "b")])
        with pytest.raises(UsageError, match="no prompt"):
            samples(dataset_name="sharegpt", dataset_path=path)

    @pytest.mark.parametrize("content", ["[{]", '{"a": 1}', '[{"conversations": 3}]'])
    def test_another_file(self, content: str, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_text(content)
        with pytest.raises(UsageError, match=r"x\.json is no ShareGPT file"):
            samples(dataset_name="sharegpt", dataset_path=path)


class TestCustom:
    def file(self, tmp_path: Path, *rows: dict[str, Any]) -> Path:
        path = tmp_path / "custom.jsonl"
        path.write_text("\n\n".join(map(json.dumps, rows)))
        return path

    def test_lines_in_the_chat_template(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, {"prompt": "a bb", "output_tokens": 3, "id": 7})
        assert samples(dataset_name="custom", dataset_path=path, num_prompts=1) == [Sample([0, 14, 11, 12], 256)]

    def test_lines_as_they_are(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, {"prompt": "a bb", "output_tokens": 3})
        given = {"dataset_name": "custom", "dataset_path": path, "skip_chat_template": True, "num_prompts": 1}
        assert samples(**given, custom_output_len=-1) == [Sample([0, 11, 12], 3)]

    def test_order_and_choice_by_seed(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, *({"prompt": "a" * (index + 1)} for index in range(9)))
        lengths = list(range(11, 20))
        random.Random(5).shuffle(lengths)
        made = samples(dataset_name="custom", dataset_path=path, num_prompts=4, seed=5)
        assert [sample.prompt_token_ids[-1] for sample in made] == lengths[:4]

    def test_a_line_without_its_length(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, {"prompt": "a bb"})
        with pytest.raises(UsageError, match="output_tokens"):
            samples(dataset_name="custom", dataset_path=path, custom_output_len=-1)

    def test_a_broken_line_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "custom.jsonl"
        path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
        with pytest.raises(UsageError, match=r"custom\.jsonl, line 2"):
            samples(dataset_name="custom", dataset_path=path)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"--dataset-path .*none\.jsonl: No such file"):
            samples(dataset_name="custom", dataset_path=tmp_path / "none.jsonl")


def test_prompts_that_the_engine_cannot_take() -> None:
    check_lengths([Sample([1] * 90, 10)], 100)
    check_lengths([Sample([1] * 90, 10)], None)
    with pytest.raises(UsageError, match="prompt 1 has 90 tokens and 11 to generate"):
        check_lengths([Sample([1], 1), Sample([1] * 90, 11)], 100)
    with pytest.raises(UsageError, match="empty"):
        check_lengths([Sample([], 1)], 100)
