"""Prompts to send: made up, or from a file."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np

from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from lmcache_stream.bench.config import ServeOptions

__all__ = ["Sample", "Tokenizer", "check_asked_lengths", "check_file", "check_lengths", "digest", "load_samples"]

_REENCODINGS: Final = 10
_SHORTEST: Final = 4
_LONGEST_PROMPT: Final = 1024
_LONGEST_TOTAL: Final = 2048


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to send.

    Args:
        prompt_token_ids: The prompt.
        output_len: Tokens to generate.
    """

    prompt_token_ids: list[int]
    output_len: int


class Tokenizer(Protocol):
    """What prompts need of a tokenizer; the calls may block.

    Attributes:
        name: What the result calls it.
        exact: Whether `decode` tells exactly what text an engine would read.
        vocab_size: Ids without added ones.
        num_special: Ids that `encode` adds to a text.
    """

    name: str
    exact: bool
    vocab_size: int
    num_special: int

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""

    def plain_ids(self) -> Sequence[int]:
        """Ids that stand for text, in order."""

    def chat(self, text: str) -> str:
        """A user's message in the model's chat template."""


def check_file(path: Path) -> None:
    """Look before the work whether the file of prompts can be read.

    Raises:
        UsageError: It cannot.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise _unreadable(path, error) from error


def load_samples(options: ServeOptions, tokenizer: Tokenizer) -> list[Sample]:
    """The prompts that `options` ask for. It blocks, for seconds with a long file: call it in a thread.

    `vllm bench serve` with the same seed makes the same prompts.

    Raises:
        UsageError: The file is missing, is of another form, or has no prompt that can be sent.
    """
    if options.dataset_name == "random":
        return _random(options, tokenizer)
    if options.dataset_name == "prefix_repetition":
        return _prefix_repetition(options, tokenizer)
    assert options.dataset_path is not None
    if options.dataset_name == "sharegpt":
        samples = _sharegpt(options, tokenizer, _conversations(options.dataset_path))
    else:
        samples = _custom(options, tokenizer, _prompts(options.dataset_path))
    if not samples:
        raise UsageError(f"{options.dataset_path} has no prompt that can be sent")
    return _oversampled(samples, options.num_prompts, options.seed)


def digest(samples: Iterable[Sample]) -> str:
    """A fingerprint of prompts and lengths."""
    found = hashlib.sha256()
    for sample in samples:
        found.update(np.array([len(sample.prompt_token_ids), sample.output_len], dtype="<i8").tobytes())
        found.update(np.array(sample.prompt_token_ids, dtype="<i8").tobytes())
    return found.hexdigest()


def _random(options: ServeOptions, tokenizer: Tokenizer) -> list[Sample]:
    """Runs of consecutive ids from a random offset, of random lengths, behind one random prefix."""
    rng = np.random.default_rng(options.seed)
    count, prefix_len, ratios = options.num_prompts, options.random_prefix_len, options.random_range_ratio
    own_len = max(0, options.random_input_len - tokenizer.num_special)
    if prefix_len + math.floor(own_len * (1 - ratios["input"])) < 1:
        raise UsageError("--random-input-len is too small: prompts could be empty")
    lens = rng.integers(*_spread(own_len, ratios["input"]), size=count)
    low, high = _spread(options.random_output_len, ratios["output"])
    output_lens = rng.integers(max(low, 1), max(high, 2), size=count)
    offsets = rng.integers(0, tokenizer.vocab_size, size=count)
    allowed = np.array(tokenizer.plain_ids())

    def more(missing: int) -> list[int]:
        return _ints(rng.integers(0, tokenizer.vocab_size, size=missing))

    prefix: list[int] = []
    if prefix_len:
        drawn = _ints(allowed[rng.integers(0, len(allowed), size=prefix_len)])
        prefix = _settled(drawn, prefix_len, tokenizer, more)[1]
    samples = []
    for index in range(count):
        own = _ints(allowed[(offsets[index] + index + np.arange(lens[index])) % len(allowed)])
        ids = _as_sent([*prefix, *own], prefix_len + int(lens[index]), tokenizer, more)
        samples.append(Sample(ids, int(output_lens[index])))
    return samples


def _prefix_repetition(options: ServeOptions, tokenizer: Tokenizer) -> list[Sample]:
    """Random prompts in groups, each group behind a prefix of its own."""
    groups = options.prefix_repetition_num_prefixes
    each = options.num_prompts // groups
    if not each:
        raise UsageError(f"--num-prompts {options.num_prompts} is less than --prefix-repetition-num-prefixes {groups}")
    rng = np.random.RandomState(options.seed)
    allowed = np.array(tokenizer.plain_ids())

    def draw(count: int) -> list[int]:
        if tokenizer.exact:
            return _ints(rng.randint(0, tokenizer.vocab_size, size=count))
        return _ints(allowed[rng.randint(0, len(allowed), size=count)])

    def settled(count: int) -> list[int]:
        return _settled(draw(count), count, tokenizer, draw)[1]

    samples = []
    for _ in range(groups):
        prefix = settled(options.prefix_repetition_prefix_len)
        for _ in range(each):
            ids = [*prefix, *settled(options.prefix_repetition_suffix_len)]
            if tokenizer.exact:
                ids = tokenizer.encode(tokenizer.decode(ids))
            samples.append(Sample(ids, options.prefix_repetition_output_len))
    random.Random(options.seed).shuffle(samples)
    return samples


def _spread(length: int, ratio: float) -> tuple[int, int]:
    """Lowest length, and one more than the highest."""
    return math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio)) + 1


def _as_sent(ids: list[int], length: int, tokenizer: Tokenizer, more: Callable[[int], list[int]]) -> list[int]:
    """The ids of a prompt as an engine reads it from its text."""
    text, settled = _settled(ids, length, tokenizer, more)
    return settled if text is None else tokenizer.encode(text)


def _settled(
    ids: list[int], length: int, tokenizer: Tokenizer, more: Callable[[int], list[int]]
) -> tuple[str | None, list[int]]:
    """A text whose ids number `length`, as far as that can be had: decode, encode, cut or fill up, and again."""
    if not tokenizer.exact:
        return None, ids
    for left in range(_REENCODINGS, -1, -1):
        text = tokenizer.decode(ids)
        ids = tokenizer.encode(text, special_tokens=False)
        if len(ids) == length or not left:
            return text, ids
        ids = ids[:length] if len(ids) > length else [*ids, *more(length - len(ids))]
    raise AssertionError("unreachable")


def _ints(array: Any) -> list[int]:
    return [int(one) for one in array]


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


class _Line(msgspec.Struct):
    prompt: str
    output_tokens: int | None = None


def _conversations(path: Path) -> list[tuple[str, str]]:
    """First message and first answer of each conversation that has both."""
    try:
        read = msgspec.json.decode(_content(path), type=list[_Conversation])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no ShareGPT file, a JSON list of conversations: {error}") from error
    return [(one.conversations[0].value, one.conversations[1].value) for one in read if len(one.conversations) >= 2]


def _prompts(path: Path) -> list[_Line]:
    lines = []
    for number, line in enumerate(_content(path).splitlines(), start=1):
        if line.strip():
            try:
                lines.append(msgspec.json.decode(line, type=_Line))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise UsageError(f'{path}, line {number}: not an object with a "prompt": {error}') from error
    return lines


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read --dataset-path {path}: {error.strerror}; it takes a file of prompts")


def _sharegpt(options: ServeOptions, tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> list[Sample]:
    random.Random(options.seed).shuffle(pairs)
    given = options.sharegpt_output_len
    samples: list[Sample] = []
    for prompt, answer in pairs:
        if len(samples) == options.num_prompts:
            break
        ids = tokenizer.encode(prompt)
        output_len = given or len(tokenizer.encode(answer))
        long_enough = len(ids) >= _SHORTEST and (given or output_len >= _SHORTEST)
        if long_enough and len(ids) <= _LONGEST_PROMPT and len(ids) + output_len <= _LONGEST_TOTAL:
            samples.append(Sample(ids, output_len))
    return samples


def _custom(options: ServeOptions, tokenizer: Tokenizer, lines: list[_Line]) -> list[Sample]:
    random.Random(options.seed).shuffle(lines)
    samples = []
    for line in lines[: options.num_prompts]:
        output_len = line.output_tokens if options.custom_output_len == -1 else options.custom_output_len
        if output_len is None or output_len < 1:
            raise UsageError(
                f"--custom-output-len -1 takes the length from each line, and {json.dumps(line.prompt[:40])} has no "
                '"output_tokens"'
            )
        text = line.prompt if options.skip_chat_template else tokenizer.chat(line.prompt)
        samples.append(Sample(tokenizer.encode(text), output_len))
    return samples


def _oversampled(samples: list[Sample], count: int, seed: int) -> list[Sample]:
    rng = random.Random(seed)
    return samples + [rng.choice(samples) for _ in range(count - len(samples))]


def check_asked_lengths(options: ServeOptions, max_model_len: int | None) -> None:
    """Refuse made-up prompts that the engine cannot take before they are made, with a `UsageError`."""
    if options.dataset_name == "random":
        length, output_len = options.random_prefix_len + options.random_input_len, options.random_output_len
        ratios = options.random_range_ratio
        least = options.random_prefix_len + math.floor(options.random_input_len * (1 - ratios["input"]))
        least += max(1, math.floor(output_len * (1 - ratios["output"])))
    elif options.dataset_name == "prefix_repetition":
        length = options.prefix_repetition_prefix_len + options.prefix_repetition_suffix_len
        output_len = options.prefix_repetition_output_len
        least = length + output_len
    else:
        return
    if max_model_len is not None and least > max_model_len:
        raise UsageError(
            f"prompts of {length:,} tokens and {output_len:,} to generate do not fit the {max_model_len:,} that the "
            "engine takes in all: use shorter ones"
        )


def check_lengths(samples: Sequence[Sample], max_model_len: int | None) -> None:
    """Refuse prompts that the engine cannot take, with a `UsageError`."""
    for number, sample in enumerate(samples):
        length = len(sample.prompt_token_ids)
        if not length:
            raise UsageError(f"prompt {number} is empty")
        if max_model_len is not None and length + sample.output_len > max_model_len:
            raise UsageError(
                f"prompt {number} has {length} tokens and {sample.output_len} to generate, and the engine takes "
                f"{max_model_len} in all: use shorter ones"
            )
