"""What a benchmark needs of room and of lengths, checked before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_stream.bench.dropping import kept_tokens
from lmcache_stream.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_stream.bench.datasets import Sample
    from lmcache_stream.editors import Editor
    from lmcache_stream.geometry import KVGeometry

__all__ = ["bytes_per_token", "check_budget", "check_edit_every", "check_room"]


def bytes_per_token(geometry: KVGeometry | None) -> int:
    """Bytes of the KV of one token.

    Raises:
        UsageError: The geometry does not tell.
    """
    if geometry is None or geometry.dtype is None:
        raise UsageError("--max-kv-bytes needs the shape of the KV: give --kv-url, or --model as the model's folder")
    return geometry.planes * geometry.num_layers * geometry.hidden_dim * geometry.dtype.itemsize


def check_budget(max_bytes: int, token_bytes: int, samples: Sequence[Sample], *, with_edits: bool) -> None:
    """Refuse a budget of KV that is less than one request needs; an edit has its KV twice.

    Raises:
        UsageError: It is less.
    """
    factor = 2 if with_edits else 1
    tokens = max(
        max(len(sample.prompt_token_ids) + sample.output_len, factor * len(sample.prompt_token_ids))
        for sample in samples
    )
    if tokens * token_bytes > max_bytes:
        raise UsageError(f"--max-kv-bytes {max_bytes:,} is less than one request needs: {tokens * token_bytes:,} bytes")


def check_edit_every(every: int, samples: Sequence[Sample]) -> None:
    """Refuse rounds of edits that no answer is long enough for.

    Raises:
        UsageError: Every answer is shorter.
    """
    longest = max(sample.output_len for sample in samples)
    if longest <= every:
        raise UsageError(
            f"--edit-every {every} would edit nothing: no prompt has more than {longest} tokens to generate; take "
            "a smaller number, or longer answers"
        )


def check_room(
    room: int, token_bytes: int, samples: Sequence[Sample], editors: Sequence[Editor], edit_every: int | None
) -> None:
    """Refuse an embedded cache in which the prompts' KV does not fit, which lies there between the phases, and the
    edits of all runs beside it.

    Args:
        room: Bytes of the cache.
        token_bytes: Bytes of the KV of one token.
        samples: The prompts.
        editors: The editor of each run.
        edit_every: Tokens between two edits of a decode; None: there are none.

    Raises:
        UsageError: It does not fit.
    """
    tokens = sum(len(sample.prompt_token_ids) for sample in samples)
    edited = sum(_tokens_stored(sample, editor, edit_every) for editor in editors for sample in samples)
    needed = (tokens + edited) * token_bytes
    if needed > room:
        raise UsageError(
            f"the KV of {len(samples)} prompts and their edits, {needed / 2**30:.1f} GiB, does not fit the "
            f"embedded cache of {room / 2**30:.1f} GiB: lower --num-prompts, or take a larger one with "
            f"--kv-url 'memory://bench?max_bytes={needed // 2**30 + 1}GiB'"
        )


def _tokens_stored(sample: Sample, editor: Editor, edit_every: int | None) -> int:
    """Tokens at most that the edits of a prompt leave in the cache; every round leaves some, and its prompt's."""
    prompt = len(sample.prompt_token_ids)
    kept = kept_tokens(editor, prompt)
    if edit_every is None:
        return kept
    rounds = (sample.output_len - 1) // edit_every
    return kept + rounds * (kept_tokens(editor, prompt + sample.output_len) + edit_every)
