"""All checks, made in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from lmcache_stream.errors import EngineResponseError, LMCacheError
from lmcache_stream.serving.doctor import both, cache, engine, limits
from lmcache_stream.serving.doctor.checks import Check
from lmcache_stream.serving.doctor.findings import Blocked, Fails, Finding, Result, blocked_by
from lmcache_stream.serving.doctor.options import DoctorOptions
from lmcache_stream.serving.doctor.visit import Visit

__all__ = ["CHECKS", "diagnose"]

CHECKS: tuple[Check, ...] = (*engine.CHECKS, *cache.CHECKS, *both.CHECKS)


async def diagnose(options: DoctorOptions, *, on_check: Callable[[str], None] | None = None) -> list[Finding]:
    """Make every check, in order.

    Args:
        options: What to examine.
        on_check: Called with the name of each check before it is made.

    Returns:
        One finding a check. No error of a server is raised.

    Raises:
        UsageError: An address cannot be right, or holds credentials.
    """
    findings: list[Finding] = []
    usable: set[str] = set()
    async with Visit(options) as visit:
        for each in CHECKS:
            if on_check is not None:
                on_check(each.name)
            missing = [name for name in each.needs if name not in usable]
            result = blocked_by(*missing) if missing else await examine(each, visit)
            if result.go_on:
                usable.add(each.name)
            detail, remedy = (printable(visit.without_key(text)) for text in (result.detail, result.remedy))
            findings.append(Finding(each.name, result.status, detail, remedy))
    return findings


async def examine(each: Check, visit: Visit) -> Result:
    limit = visit.options.timeout if each.patient else min(limits.QUICK, visit.options.timeout)
    try:
        async with asyncio.timeout(limit):
            return await each.examine(visit)
    except Fails as end:
        return end.result
    except Blocked as end:
        return blocked_by(*end.args)
    except TimeoutError as error:
        remedy = "raise --timeout, or look into the logs of both servers" if each.patient else each.remedy
        return Result("fail", str(error) or f"did not end within {limit:g} s", remedy, go_on=False)
    except (LMCacheError, OSError, aiohttp.ClientError) as error:
        broken = isinstance(error, EngineResponseError) and error.status >= 500
        remedy = "look into the engine's log" if broken else each.remedy
        return Result("fail", str(error) or type(error).__name__, remedy, go_on=False)


def printable(text: str) -> str:
    # Servers' words end up here: they must not steer the terminal.
    return "".join(char if char.isprintable() else " " for char in text)
