"""The checks of engine and cache server together."""

from __future__ import annotations

import asyncio
import random
import time
import warnings
from collections.abc import Callable
from functools import partial

from lmcache_stream.kvcache.equality import equal_bytes
from lmcache_stream.serving.doctor import limits
from lmcache_stream.serving.doctor.checks import Check, Examine, declare
from lmcache_stream.serving.doctor.findings import Fails, Result, passes, warns
from lmcache_stream.serving.doctor.remedies import CONNECTOR, HONOUR_SALTS, START_CACHE, TELL_CACHED
from lmcache_stream.serving.doctor.status import held, part, scratch_clients
from lmcache_stream.serving.doctor.visit import Visit

__all__ = ["CHECKS"]

CHUNKS = 3
TAIL = 5

CHECKS: list[Check] = []
check: partial[Callable[[Examine], Examine]] = partial(declare, CHECKS)


@check(
    "offload",
    needs=["token ids", "cache salt", "geometry"],
    remedy=CONNECTOR,
    patient=True,
)
async def kv_comes_into_the_cache(visit: Visit) -> Result:
    chunk = visit.context.chunk_size
    longest = (visit.card and visit.card.max_model_len) or CHUNKS * chunk + TAIL + 1
    chunks = min(CHUNKS, (longest - TAIL - 1) // chunk)
    if chunks < 1:
        raise Fails(
            f"the engine's longest sequence of {longest} tokens holds no chunk of {chunk}",
            "start the LMCache server with a smaller --chunk-size",
        )
    visit.salt = visit.salted("prompt")
    visit.prompt = random.Random(0).choices(range(10, 200), k=chunks * chunk + TAIL)
    started = time.monotonic()
    cached = await visit.cached_tokens(visit.salt)
    if cached:
        raise Fails(f"{cached} tokens are taken from a cache under a fresh salt", HONOUR_SALTS)
    answered = time.monotonic()
    covered = await visit.context.wait_for(
        visit.prompt, timeout=min(limits.ARRIVAL, visit.options.timeout / 2), cache_salt=visit.salt, poll_interval=0.05
    )
    if covered < chunks * chunk:
        raise Fails(
            f"the cache has {covered} of {chunks * chunk} tokens {time.monotonic() - answered:.0f} s after the answer",
            f"{CONNECTOR}; raise --l1-size-gb if it is full. {HONOUR_SALTS}",
        )
    seconds = time.monotonic() - answered
    return passes(f"{covered} tokens, {seconds:.2f} s after an answer that took {answered - started:.2f} s")


@check("salts apart", needs=["offload"], remedy=HONOUR_SALTS, patient=True)
async def salts_keep_apart(visit: Visit) -> Result:
    other = visit.salted("other")
    found = await visit.context.lookup(visit.prompt, other)
    if found:
        raise Fails(f"the cache finds {found} tokens of one salt under another", HONOUR_SALTS)
    cached = await visit.cached_tokens(other)
    if cached:
        raise Fails(f"the engine takes {cached} tokens of one salt for another", HONOUR_SALTS)
    return passes("KV of one salt is not found under another")


@check(
    "reading",
    needs=["offload"],
    remedy="connect with geometry=KVGeometry.from_config('config.json') of the model that vLLM runs; a block format "
    "that is not known cannot be edited",
    patient=True,
)
async def reading_is_proven(visit: Visit) -> Result:
    if not visit.options.probe:
        return Result("skip", "--no-probe: how the KV is to be read is believed, not proven")
    visit.requests += 1
    result = await visit.context.probe(visit.client, timeout=visit.options.timeout / 2)
    unproven = f"; not proven: {'; '.join(result.unproven)}" if result.unproven else ""
    return passes(f"proven over {result.span} positions: {'; '.join(result.proven)}{unproven}")


@check(
    "round trip",
    needs=["offload", "reading"],
    remedy="run doctor without --no-probe, and look into the LMCache server's log",
    patient=True,
)
async def kv_goes_round(visit: Visit) -> Result:
    context, prompt = visit.context, visit.prompt
    kv = await context.retrieve(prompt, visit.salt)
    whole = len(prompt) // context.chunk_size * context.chunk_size
    if kv is None or kv.shape[2] < whole:
        got = 0 if kv is None else kv.shape[2]
        raise Fails(f"the cache gives {got} of {whole} tokens back", "raise the LMCache server's --l1-size-gb")
    salt = visit.salted("edit")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about IsolatedLRU, which is a finding of its own
        outcome = await context.put(kv, prompt[:whole], salt)
    if not outcome.complete:
        raise Fails(
            f"the cache took {outcome.taken} of {outcome.chunks} chunks under a fresh salt",
            "raise the LMCache server's --l1-size-gb",
        )
    back = await context.retrieve(prompt, salt)
    if back is None or not await context.executor.run(equal_bytes, kv, back):
        raise Fails("what was stored came back changed", "look into the LMCache server's log")
    cached = await visit.cached_tokens(salt)
    if cached is None:
        return warns("stored and read back; nothing tells whether the engine decoded from it", TELL_CACHED)
    if cached < whole:
        raise Fails(f"the engine took {cached} of {whole} stored tokens from the cache", f"{CONNECTOR}. {HONOUR_SALTS}")
    megabytes = kv.numel() * kv.element_size() / 1e6
    return passes(f"{whole} tokens ({megabytes:.1f} MB) read, stored under another salt, and decoded from")


@check("clean up", needs=["cache http"], remedy=START_CACHE)
async def nothing_is_left(visit: Visit) -> Result:
    await visit.leave()
    before, clients_before = held(visit.status), scratch_clients(visit.status)
    deadline = time.monotonic() + limits.ANSWER
    while True:
        status = await visit.cache_status()
        left = {name: count for name, count in held(status).items() if count > before.get(name, 0)}
        if clients := scratch_clients(status) - clients_before:
            left["clients registered"] = len(clients)
        if not left:
            return passes("no lock, session or registration is left")
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    # Where the server pulls the KV, it opens the session of a finished request again to do so (LMCache 0.5.6).
    more = left.get("sessions", 0) - before.get("sessions", 0)
    if part(status, "cache_context_meta") and left.keys() == {"sessions"} and more <= visit.requests:
        return passes(f"no lock or registration is left; {more} sessions are the engine's")
    words = ", ".join(f"{count} {name}" for name, count in left.items())
    if any(before.values()):
        return warns(f"{words}, on a server that was at work before", "run doctor again when the server is idle")
    raise Fails(words, "if other clients are at work, run doctor when they are not; the server lets go in some minutes")
