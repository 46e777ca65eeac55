"""The entries of a batch's journal: what each holds, and how the state of a stream becomes one and is had from one."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from lmcache_stream.editors.base import Editor
from lmcache_stream.metrics import StreamPerfMetrics
from lmcache_stream.stream.state import ModifyReceipt, StreamState

__all__ = ["Asked", "Change", "Done", "Member", "Run", "apply", "describe", "digest_of", "encode_asked", "entry_of"]

_encode = msgspec.json.Encoder(enc_hook=repr, order="deterministic").encode


class Run(msgspec.Struct, frozen=True, tag="run", tag_field="kind"):
    """What follows was done by another process."""


class Member(msgspec.Struct, frozen=True, tag="stream", tag_field="kind"):
    """A stream as it was added.

    Args:
        stream: Its place in the batch.
        prompt: The `digest_of` its state: of its ids and salt.
    """

    stream: int
    prompt: str


class Asked(msgspec.Struct, frozen=True, tag="call", tag_field="kind"):
    """What a phase asked of its streams.

    Args:
        call: Its number, by which operations name it.
        asked: What it was, as JSON values.
    """

    call: int
    asked: dict[str, Any]


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an operation did to a stream.

    Args:
        keep: How many ids, of those before it with their suffix, its ids begin with.
        then: Its other ids; None: those that were generated.
        generated: Ids that were generated.
        text: Text that came with them.
    """

    keep: int
    then: list[int] | None = None
    suffix: list[int] = []
    salt: str = ""
    expected: int = 0
    stored: int = 0
    fingerprint: list[list[int]] | None = None
    unverified: bool = False
    shared: bool = False
    lost: int = 0
    generated: list[int] = []
    text: str = ""
    done: bool = False
    finish_reason: str | None = None


class _Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """The figures of a request; arrivals in seconds since it was sent."""

    duration: float
    input_tokens: int
    times: list[float] = []
    cached_tokens: int | None = None
    edit_shortfall: int = 0


class _Receipt(msgspec.Struct, frozen=True, omit_defaults=True):
    """The receipt of an edit, without the positions that it kept."""

    tokens_before: int
    tokens_after: int
    asked: float | int | None = None
    chunks_stored: int = 0
    recomputed: int = 0
    bytes_moved: int = 0
    seconds: dict[str, float] = {}
    salt: str = ""
    stored: bool = True


class Done(msgspec.Struct, frozen=True, omit_defaults=True, tag="done", tag_field="kind"):
    """One operation of one stream.

    Args:
        stream: Its place in the batch.
        step: How many operations of it came before; what the journal has from there on no longer holds.
        call: What was asked.
        at: Seconds since the phase began.
        change: What became of the stream.
        request: Of a request, and of one in which edits were made.
        receipt: Of an edit, and of the last one in a request.
        error: Why it failed; empty if it did not.
        run: Which process did it; set when the journal is read.
    """

    stream: int
    step: int
    call: int
    at: float
    change: Change
    request: _Request | None = None
    receipt: _Receipt | None = None
    error: str = ""
    run: int = -1


def encode_asked(asked: Mapping[str, Any]) -> bytes:
    """What a phase asks, in JSON that is the same when it asks for the same."""
    return _encode(asked)


def describe(editor: object) -> str:
    """An editor or a function in words that are the same in another process."""
    words = repr(editor) if isinstance(editor, Editor) else getattr(editor, "__qualname__", type(editor).__name__)
    return re.sub(r" at 0x[0-9a-f]+", "", words)


def digest_of(state: StreamState) -> str:
    """A digest of the ids and the salt with which a stream was added."""
    digest = hashlib.blake2b(digest_size=16)
    for ids in (state.tokens, state.suffix):
        digest.update(array("q", ids).tobytes() + b"|")
    digest.update(state.original_salt.encode())
    return digest.hexdigest()


def entry_of(
    before: StreamState, after: StreamState, *, stream: int, step: int, call: int, at: float, outcome: Any, error: str
) -> Done:
    """One operation of a stream, which found it as `before` and left it as `after`; the rest as for `Done`."""
    return Done(
        stream=stream,
        step=step,
        call=call,
        at=at,
        change=_change(before, after),
        request=_request(outcome) if isinstance(outcome, StreamPerfMetrics) else None,
        receipt=_receipt(after.last_receipt) if after.last_receipt is not before.last_receipt else None,
        error=error,
    )


def apply(entry: Done, state: StreamState) -> None:
    """Bring `state`, as it was before the operation, to where the operation left it."""
    change = entry.change
    then = change.generated if change.then is None else change.then
    state.tokens = [*[*state.tokens, *state.suffix][: change.keep], *then]
    state.suffix = change.suffix.copy()
    state.generated += change.generated
    state.decoded += len(change.generated)
    if change.text:
        state.text_parts.append(change.text)
    for name in ("salt", "expected", "stored", "unverified", "shared", "lost", "done", "finish_reason"):
        setattr(state, name, getattr(change, name))
    state.fingerprint = torch.tensor(change.fingerprint) if change.fingerprint is not None else None
    if entry.request is not None:
        figures = msgspec.structs.asdict(entry.request)
        state.last_metrics = StreamPerfMetrics.from_times(start=0.0, end=figures.pop("duration"), **figures)
    if entry.receipt is not None:
        state.last_receipt = ModifyReceipt(**msgspec.structs.asdict(entry.receipt))


def _change(before: StreamState, after: StreamState) -> Change:
    keep = _common([*before.tokens, *before.suffix], after.tokens)
    then, generated = after.tokens[keep:], after.generated[len(before.generated) :]
    return Change(
        keep=keep,
        then=None if then == generated else then,
        suffix=after.suffix.copy(),
        salt=after.salt,
        expected=after.expected,
        stored=after.stored,
        fingerprint=after.fingerprint.tolist() if after.fingerprint is not None else None,
        unverified=after.unverified,
        shared=after.shared,
        lost=after.lost,
        generated=generated,
        text="".join(after.text_parts[len(before.text_parts) :]),
        done=after.done,
        finish_reason=after.finish_reason,
    )


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids both begin with."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(at for at in range(most) if first[at] != second[at])


def _request(metrics: StreamPerfMetrics) -> _Request:
    return _Request(
        duration=metrics.duration,
        input_tokens=metrics.input_tokens,
        times=list(metrics.times),
        cached_tokens=metrics.cached_tokens,
        edit_shortfall=metrics.edit_shortfall,
    )


def _receipt(receipt: ModifyReceipt | None) -> _Receipt | None:
    if receipt is None:
        return None
    values = {name: getattr(receipt, name) for name in _Receipt.__struct_fields__}
    return _Receipt(**{**values, "seconds": dict(receipt.seconds)})
