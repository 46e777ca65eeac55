"""Edits between the passes of one call: when they come, and what does them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from lmcache_stream.editors.base import Editor
from lmcache_stream.errors import UsageError

__all__ = ["EditsWhileDecoding", "ModifyFn", "check_editor", "plan_passes"]

ModifyFn: TypeAlias = Callable[[torch.Tensor, list[int]], Any]
"""`fn(kv [2, L, T, D], tokens) -> (new_kv [2, L, T', D], new_tokens)`, sync or async; None: nothing to store."""


def check_editor(fn: object) -> None:
    """Refuse what can be no edit: it is neither an editor nor a function."""
    if not callable(fn) or isinstance(fn, type):
        raise UsageError(
            f"an edit is an Editor, such as StreamingLLM(keep=0.5), or a function fn(kv, tokens), not {fn!r}"
        )


@dataclass(frozen=True, slots=True)
class EditsWhileDecoding:
    """Edits between the passes of one call.

    Args:
        every: Tokens between two edits.
        editor: What edits.
        slots: Bounds how many streams edit at once.
    """

    every: int
    editor: ModifyFn | Editor
    slots: AbstractAsyncContextManager[object] = field(default_factory=nullcontext)

    @classmethod
    def checked(
        cls,
        edit_every: int | None,
        editor: ModifyFn | Editor | None,
        slots: AbstractAsyncContextManager[object] | None = None,
    ) -> EditsWhileDecoding | None:
        """The edits that a caller asks for; None for none."""
        if edit_every is None and editor is None:
            return None
        if edit_every is None or editor is None:
            raise UsageError("edit_every and editor go together: give both, or none")
        if type(edit_every) is not int or edit_every < 1:
            raise UsageError(f"edit_every must be a number of tokens of at least 1, not {edit_every!r}")
        check_editor(editor)
        return cls(edit_every, editor, slots or nullcontext())


def plan_passes(max_tokens: int | None, edits: EditsWhileDecoding | None) -> Iterator[tuple[int | None, bool]]:
    """`max_tokens` of each pass (None: as the caller says), and whether an edit comes after it.

    The last token before an edit is a pass of its own: its prompt holds the tokens before it, so that the engine
    offloads them.
    """
    if edits is None:
        yield None, False
        return
    if max_tokens is None:
        raise UsageError("edit_every needs max_tokens: the tokens to decode in all")
    while max_tokens > edits.every:
        if edits.every > 1:
            yield edits.every - 1, False
        yield 1, True
        max_tokens -= edits.every
    yield max_tokens, False
