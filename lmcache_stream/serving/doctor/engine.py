"""The checks of the engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from lmcache_stream.completions.faults import excerpt
from lmcache_stream.errors import EngineResponseError
from lmcache_stream.serving.doctor import limits
from lmcache_stream.serving.doctor.checks import Check, Examine, declare
from lmcache_stream.serving.doctor.findings import Fails, Result, passes, warns
from lmcache_stream.serving.doctor.http import version_in
from lmcache_stream.serving.doctor.remedies import HONOUR_SALTS, START_ENGINE, TELL_CACHED
from lmcache_stream.serving.doctor.visit import Visit

__all__ = ["CHECKS"]

SHORT_PROMPT = (11, 29, 53, 83, 127, 191)

CHECKS: list[Check] = []
check: partial[Callable[[Examine], Examine]] = partial(declare, CHECKS)


@check("engine", remedy=START_ENGINE)
async def engine_is_healthy(visit: Visit) -> Result:
    status, body = await visit.engine_get("/health")
    if status == 503:
        raise Fails(f"/health answers 503: {excerpt(body, 120)}", "wait until vLLM is ready, or look into its log")
    if status != 200:
        raise Fails(f"/health answers {status}: {excerpt(body, 120)}", "is --base-url the address of vLLM?")
    return passes(f"{visit.client.base_url} is healthy")


@check("engine version", needs=["engine"], remedy=START_ENGINE)
async def engine_version(visit: Visit) -> Result:
    return passes(version_in(*await visit.engine_get("/version")))


@check("model", needs=["engine"], remedy="is --base-url the address of vLLM?")
async def model_is_served(visit: Visit) -> Result:
    try:
        cards = await visit.client.models(timeout=limits.ANSWER)
    except EngineResponseError as error:
        if error.status in (401, 403):
            raise Fails(str(error), "give the engine's key with --api-key, or in OPENAI_API_KEY") from None
        raise
    names = ", ".join(repr(card.id) for card in cards) or "none"
    wanted = visit.options.model
    found = [card for card in cards if wanted in (None, card.id)]
    if not found:
        named = f"not {wanted!r}; " if wanted else ""
        raise Fails(f"{named}served: {names}", "give --model one of the names served")
    if len(found) > 1:
        raise Fails(f"several models are served: {names}", "choose one with --model")
    visit.card = found[0]
    root = f", loaded from {visit.card.root}" if visit.card.root not in (None, visit.card.id) else ""
    return passes(f"{visit.card.id}{root}")


@check(
    "token ids",
    needs=["model"],
    remedy="serve with vLLM 0.10.2 or newer, and with no proxy in between that drops return_token_ids or token_ids",
    patient=True,
)
async def token_ids_come_back(visit: Visit) -> Result:
    try:
        ids, visit.completion = await visit.complete(SHORT_PROMPT)
    except EngineResponseError as error:
        raise Fails(f"the engine refuses a completion: {error}", "look into the engine's log") from None
    usage = visit.completion.usage
    if usage is None:
        return warns(f"{ids} came, but no usage", "serve with an engine that knows stream_options.include_usage")
    if len(ids) != usage.completion_tokens or len(ids) != 1:
        raise Fails(
            f"{len(ids)} ids came for one token asked for and {usage.completion_tokens} counted",
            "serve with an engine that honours max_tokens and return_token_ids, such as vLLM 0.10.2 or newer",
        )
    return passes("as many ids as usage counts")


@check("cached tokens", needs=["token ids"], remedy=TELL_CACHED)
async def usage_tells_cached_tokens(visit: Visit) -> Result:
    usage = visit.completion.usage
    if usage is None or usage.cached_tokens is None:
        return warns("usage does not tell cached_tokens", TELL_CACHED)
    return passes("usage tells cached_tokens")


@check("cache salt", needs=["token ids"], remedy=HONOUR_SALTS, patient=True)
async def cache_salt_is_accepted(visit: Visit) -> Result:
    await visit.complete(SHORT_PROMPT, visit.salted("accepted"))
    return passes("a request with cache_salt is accepted")


@check("prefix caching", needs=["engine"], remedy=START_ENGINE)
async def prefix_caching(visit: Visit) -> Result:
    status, body = await visit.engine_get("/metrics")
    info = re.search(rb'vllm:cache_config_info\{[^}]*enable_prefix_caching="(\w+)"', body) if status == 200 else None
    told = {b"True": "on", b"False": "off"}.get(info[1]) if info else None
    return passes(f"{told or 'not told'}; either will do, since every edit has a cache_salt of its own")
