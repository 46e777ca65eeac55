"""What a cache server can do wrong."""

from __future__ import annotations

import asyncio
from typing import Any

from lmcache_stream import (
    CacheConnectionError,
    CacheError,
    CacheProtocolError,
    CacheTimeout,
    CoverageTimeout,
    EditNotUsed,
    GeometryError,
    LMCacheStreamError,
    StoreError,
)
from lmcache_stream.kvcache.mp import wire
from lmcache_stream.testing.fake_cache_server import FaultKind

from .outcome import PICKLE, SHARED, Fault, Order, Raises, Survives
from .stack import GEOMETRY, MODEL, Stack

PATIENCE = 2.5
RESERVED = {"reservations": 2, "writes": 1}
Operation = wire.Operation[Any]


BROKE = "broke before"
NOBODY = "no cache server answers"


def fails(cause: type[Exception], words: str | tuple[str, ...]) -> Raises:
    return Raises(LMCacheStreamError, words, cause)


def strikes(operation: Operation, kind: FaultKind, **options: Any) -> Order:
    return lambda stack: stack.strike(operation, kind, **options)


def in_modify(
    name: str,
    operation: Operation,
    kind: FaultKind,
    expect: Raises | Survives,
    *,
    after: int = 0,
    seconds: float | None = None,
    **more: Any,
) -> Fault:
    order = strikes(operation, kind, after=after, seconds=seconds)
    return Fault(name=name, side="cache", phase="modify", order=order, expect=expect, **more)


def spoiled_slots(name: str, kind: FaultKind, words: str) -> Fault:
    """Slots that nobody can write to stay reserved until the server takes them back."""
    return nonsense(name, wire.PREPARE_STORE, kind, words, leaves=RESERVED, registered=True, transports=SHARED)


def unanswered(name: str, operation: Operation, kind: FaultKind, *, after: int = 0, **more: Any) -> Fault:
    """No answer comes, or none that can be understood as one."""
    words = f"is up but did not answer {operation.name}"
    return in_modify(name, operation, kind, fails(CacheTimeout, words), after=after, **{"patience": PATIENCE, **more})


def nonsense(
    name: str, operation: Operation, kind: FaultKind, words: str | tuple[str, ...], *, after: int = 0, **more: Any
) -> Fault:
    return in_modify(name, operation, kind, fails(CacheProtocolError, words), after=after, **more)


def at_connect(name: str, order: Order, error: type[Exception], words: str | tuple[str, ...], **more: Any) -> Fault:
    return Fault(name=name, side="cache", phase="connect", order=order, expect=Raises(error, words), **more)


def release(stack: Stack) -> None:
    for fault in stack.cache_faults:
        fault.release()


def http_says(path: str, answer: Any) -> Order:
    def order(stack: Stack) -> None:
        stack.server.http_answers[path] = answer

    return order


def http_is_well(stack: Stack) -> None:
    stack.server.http_status = 200
    stack.server.http_answers.clear()


def http_fails(status: int) -> Order:
    def order(stack: Stack) -> None:
        stack.server.http_status = status

    return order


def sets(**attributes: Any) -> Order:
    def order(stack: Stack) -> None:
        for name, value in attributes.items():
            setattr(stack.server, name, value)

    return order


def serve_again(stack: Stack) -> None:
    stack.server.serve(MODEL, GEOMETRY)


def lose_the_engine(stack: Stack) -> None:
    stack.server.forget_engines()


async def kill(stack: Stack) -> None:
    await asyncio.to_thread(stack.server.kill)


async def kill_the_request_port(stack: Stack) -> None:
    await kill(stack)
    stack.server.http_status = 200


async def come_back(stack: Stack) -> None:
    await stack.struck()
    await asyncio.to_thread(stack.server.restart)


async def restart(stack: Stack) -> None:
    await asyncio.to_thread(stack.server.restart)


def restarted_with_the_prompt(stack: Stack) -> None:
    """The engine computes the prompt for somebody else, so that its KV is there again."""
    stack.server.offload(MODEL, stack.prompts[0])


async def struck_and_the_prompt_is_back(stack: Stack) -> None:
    await stack.struck()
    restarted_with_the_prompt(stack)


async def back_with_the_prompt(stack: Stack) -> None:
    await come_back(stack)
    restarted_with_the_prompt(stack)


def evict_all(stack: Stack) -> None:
    stack.server.evict(stack.server.chunks)


def evict_one_of_the_edit(stack: Stack) -> None:
    stack.server.evict(stack.server.chunks - 1)


def cancel_when_struck(stack: Stack, task: asyncio.Task[None]) -> Any:
    async def cancel() -> None:
        await stack.struck()
        task.cancel()
        await asyncio.sleep(0.05)
        release(stack)

    return cancel()


def cancelled(name: str, operation: Operation, *, after: int = 0, **more: Any) -> Fault:
    """The caller is cancelled while an answer is late."""
    return in_modify(
        name, operation, "hold", Raises(asyncio.CancelledError), after=after, meanwhile=cancel_when_struck, **more
    )


CACHE_FAULTS = [
    # It cannot be connected to.
    at_connect("/config says 503", http_fails(503), CacheConnectionError, "not ready yet", lift=http_is_well),
    at_connect("/config says 500", http_fails(500), CacheProtocolError, "answers 500", lift=http_is_well),
    at_connect(
        "/config is a web page", http_says("/config", b"<html>"), CacheProtocolError, "no JSON", lift=http_is_well
    ),
    at_connect("/config lacks its keys", http_says("/config", {}), CacheProtocolError, "config", lift=http_is_well),
    at_connect("/status is a list", http_says("/status", []), CacheProtocolError, "status", lift=http_is_well),
    at_connect("/status is no JSON", http_says("/status", b"{"), CacheProtocolError, "no JSON", lift=http_is_well),
    at_connect("no engine has registered", lose_the_engine, CacheConnectionError, MODEL, lift=serve_again),
    at_connect(
        "server without operations that move data",
        sets(transfer_mode="lmcache_driven"),
        CacheConnectionError,
        "--supported-transfer-mode auto",
        lift=sets(transfer_mode="auto"),
    ),
    at_connect(
        "nobody at the request port",
        kill_the_request_port,
        CacheConnectionError,
        (NOBODY, "is gone: neither"),
        lift=come_back,
    ),
    # Its answer does not come.
    unanswered("first lookup is not worked on", wire.LOOKUP, "ignore"),
    unanswered("answer to the first lookup is lost", wire.LOOKUP, "lose"),
    unanswered("answer to a lookup has too few frames", wire.LOOKUP, "frames"),
    unanswered("answer to a lookup is for another request", wire.LOOKUP, "unknown"),
    unanswered("lookup of the retrieve is not worked on", wire.LOOKUP, "ignore", after=1),
    unanswered("count of the chunks found is lost", wire.WAIT_PREFETCH_STATUS, "lose", after=1),
    unanswered("places of the chunks to read are lost", wire.PREPARE_RETRIEVE, "lose"),
    unanswered("places of the chunks to read are not looked for", wire.PREPARE_RETRIEVE, "ignore", transports=SHARED),
    unanswered(
        "pickled chunks to read are not looked for",
        wire.PREPARE_RETRIEVE,
        "ignore",
        leaves={"read locks": 5},
        transports=PICKLE,
    ),
    unanswered(
        "places to write to are not looked for", wire.PREPARE_STORE, "ignore", registered=True, transports=SHARED
    ),
    unanswered("pickled chunks are not waited for", wire.PREPARE_STORE, "ignore", transports=PICKLE),
    in_modify("end of the reading is not taken note of", wire.COMMIT_RETRIEVE, "ignore", Survives()),
    in_modify("answer to the end of the reading is lost", wire.COMMIT_RETRIEVE, "lose", Survives()),
    in_modify(
        "end of the session is not taken note of", wire.END_SESSION, "ignore", Survives(), leaves={"sessions": 1}
    ),
    in_modify("commit of the store is not worked on, once", wire.COMMIT_STORE, "ignore", Survives(), transports=SHARED),
    in_modify(
        "answer to the commit of the store is lost, once", wire.COMMIT_STORE, "lose", Survives(), transports=SHARED
    ),
    unanswered("pickled chunks are not taken", wire.COMMIT_STORE, "ignore", transports=PICKLE),
    unanswered("answer to pickled chunks is lost", wire.COMMIT_STORE, "lose", transports=PICKLE),
    # Its answer comes late, twice, or garbled.
    unanswered("answer to the first lookup is late", wire.LOOKUP, "hold", lift=release),
    unanswered("count of the chunks found is late", wire.WAIT_PREFETCH_STATUS, "hold", after=1, lift=release),
    unanswered("places of the chunks to read are late", wire.PREPARE_RETRIEVE, "hold", lift=release),
    unanswered("places to write to are late", wire.PREPARE_STORE, "hold", lift=release),
    in_modify("answer to the commit of the store is slow", wire.COMMIT_STORE, "hold", Survives(), seconds=0.2),
    in_modify("lookup is answered twice", wire.LOOKUP, "duplicate", Survives()),
    in_modify("places to read are told twice", wire.PREPARE_RETRIEVE, "duplicate", Survives()),
    in_modify("places to write to are told twice", wire.PREPARE_STORE, "duplicate", Survives()),
    in_modify("commit of the store is answered twice", wire.COMMIT_STORE, "duplicate", Survives()),
    nonsense("count of the chunks found is no MessagePack", wire.WAIT_PREFETCH_STATUS, "garble", "cannot be read"),
    nonsense("count of the chunks found is a map", wire.WAIT_PREFETCH_STATUS, "wrong-type", "cannot be read"),
    nonsense("more chunks found than asked for", wire.WAIT_PREFETCH_STATUS, "too-many", "found 1000005 chunks"),
    nonsense("answer names another operation", wire.LOOKUP, "wrong-operation", "answered 99 to lookup"),
    nonsense("places to read are no MessagePack", wire.PREPARE_RETRIEVE, "garble", "cannot be read"),
    nonsense("no answer but an empty one", wire.PREPARE_RETRIEVE, "nothing", "with nothing"),
    spoiled_slots("places to write to are no MessagePack", "garble", "cannot be read"),
    spoiled_slots("places to write to are something else", "wrong-type", "offers no shared memory"),
    in_modify(
        "answer to the commit of the store is garbled", wire.COMMIT_STORE, "garble", Survives(), transports=SHARED
    ),
    nonsense("answer to pickled chunks is garbled", wire.COMMIT_STORE, "garble", "cannot be read", transports=PICKLE),
    # The chunks are not what they should be.
    nonsense("a chunk to read is missing", wire.PREPARE_RETRIEVE, "few", "gave [4] chunks, not 5"),
    nonsense(
        "all chunks to read are missing", wire.PREPARE_RETRIEVE, "empty", ("gave [0] chunks, not 5", "cannot be read")
    ),
    nonsense("slots to read lie outside the pool", wire.PREPARE_RETRIEVE, "outside", "does not fit", transports=SHARED),
    nonsense("slots to read lie on each other", wire.PREPARE_RETRIEVE, "overlap", "overlap", transports=SHARED),
    in_modify(
        "chunks to read have another shape", wire.PREPARE_RETRIEVE, "shape", fails(GeometryError, "geometry in use")
    ),
    nonsense("slots to read have no dtype", wire.PREPARE_RETRIEVE, "dtype", "float13", transports=SHARED),
    in_modify(
        "pickled chunks have another dtype",
        wire.PREPARE_RETRIEVE,
        "dtype",
        fails(GeometryError, "torch.float64"),
        transports=PICKLE,
    ),
    nonsense("pickle that calls a function", wire.PREPARE_RETRIEVE, "pickle", "pickle that wants", transports=PICKLE),
    spoiled_slots("a slot to write to is missing", "few", "offers 1 slots"),
    spoiled_slots("slots to write to lie outside the pool", "outside", "does not fit"),
    spoiled_slots("slots to write to lie on each other", "overlap", "overlap"),
    spoiled_slots("slots to write to have another shape", "shape", "offers slots of"),
    # Chunks come and go.
    in_modify(
        "no room for the edit", wire.PREPARE_STORE, "no-room", Raises(StoreError, "it has no room"), transports=SHARED
    ),
    in_modify(
        "no room for pickled chunks",
        wire.COMMIT_STORE,
        "no-room",
        Raises(StoreError, "it has no room"),
        transports=PICKLE,
    ),
    in_modify(
        "prompt evicted between lookup and read",
        wire.PREPARE_RETRIEVE,
        "evict",
        fails(CacheError, "lost chunks between"),
        lift=restarted_with_the_prompt,
    ),
    in_modify(
        "prompt evicted between waiting and lookup",
        wire.LOOKUP,
        "evict",
        Raises(CoverageTimeout, "covers 0 of 40"),
        after=1,
        coverage=0.3,
        lift=restarted_with_the_prompt,
    ),
    in_modify(
        "reservation has run out before the commit",
        wire.COMMIT_STORE,
        "evict",
        Raises(StoreError, "it has no room"),
        transports=SHARED,
    ),
    Fault(
        name="edit evicted before it is decoded from",
        side="cache",
        phase="decode",
        order=evict_all,
        expect=Raises(EditNotUsed, "the cache holds 0 of the edit's 16 tokens"),
        restarted=True,
    ),
    Fault(
        name="a chunk of the edit evicted before it is decoded from",
        side="cache",
        phase="decode",
        order=evict_one_of_the_edit,
        expect=Raises(EditNotUsed, "of the edit's 16 tokens"),
        restarted=True,
    ),
    # It forgets, restarts or dies.
    Fault(
        name="client forgotten before the edit",
        side="cache",
        phase="modify",
        order=lambda stack: stack.server.forget(),
        expect=Survives(),
    ),
    in_modify("client forgotten before the read", wire.PREPARE_RETRIEVE, "forget", Survives()),
    in_modify("client forgotten before the write", wire.PREPARE_STORE, "forget", Survives()),
    in_modify(
        "client forgotten before the commit",
        wire.COMMIT_STORE,
        "forget",
        fails(CacheConnectionError, "restarted while chunks were stored"),
        transports=SHARED,
    ),
    unanswered("client forgotten before it sends pickled chunks", wire.COMMIT_STORE, "forget", transports=PICKLE),
    Fault(
        name="engine's registration is gone",
        side="cache",
        phase="modify",
        order=lose_the_engine,
        lift=serve_again,
        expect=fails(CacheConnectionError, "no engine is registered"),
    ),
    Fault(
        name="server restarts between prefill and edit",
        side="cache",
        phase="modify",
        order=restart,
        lift=restarted_with_the_prompt,
        coverage=0.3,
        expect=Raises(CoverageTimeout, "covers 0 of 40"),
    ),
    Fault(
        name="server restarts between edit and decode",
        side="cache",
        phase="decode",
        order=restart,
        expect=Raises(EditNotUsed, "the cache holds 0 of the edit's 16"),
        restarted=True,
    ),
    in_modify(
        "server restarts at the lookup",
        wire.LOOKUP,
        "restart",
        fails(CacheConnectionError, BROKE),
        lift=struck_and_the_prompt_is_back,
    ),
    in_modify(
        "server restarts at the read",
        wire.PREPARE_RETRIEVE,
        "restart",
        fails(CacheError, (BROKE, "lost chunks between", "restarted meanwhile")),
        lift=struck_and_the_prompt_is_back,
    ),
    in_modify("server restarts at the end of the read", wire.COMMIT_RETRIEVE, "restart", Survives()),
    in_modify(
        "server dies at the write",
        wire.PREPARE_STORE,
        "die",
        fails(CacheConnectionError, BROKE),
        lift=back_with_the_prompt,
    ),
    in_modify(
        "server restarts at the commit",
        wire.COMMIT_STORE,
        "restart",
        fails(CacheConnectionError, (BROKE, "restarted while chunks were stored")),
        lift=struck_and_the_prompt_is_back,
    ),
    in_modify(
        "server dies at the read",
        wire.PREPARE_RETRIEVE,
        "die",
        fails(CacheConnectionError, BROKE),
        lift=back_with_the_prompt,
    ),
    in_modify(
        "server dies at the commit",
        wire.COMMIT_STORE,
        "die",
        fails(CacheConnectionError, (BROKE, NOBODY)),
        lift=back_with_the_prompt,
    ),
    Fault(
        name="server is down when it should decode",
        side="cache",
        phase="decode",
        order=kill,
        lift=come_back,
        expect=fails(CacheConnectionError, NOBODY),
        restarted=True,
    ),
    # Its HTTP fails while it works.
    Fault(
        name="/status says 503 during the edit",
        side="cache",
        phase="modify",
        order=http_fails(503),
        lift=http_is_well,
        expect=Survives(),
    ),
    # The caller is cancelled while it is slow.
    cancelled("cancelled while a lookup is late", wire.LOOKUP),
    cancelled("cancelled while the places to read are late", wire.PREPARE_RETRIEVE),
    cancelled("cancelled while the places to write to are late", wire.PREPARE_STORE),
    cancelled("cancelled while the commit is late", wire.COMMIT_STORE),
]
