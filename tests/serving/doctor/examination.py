"""An examination, and what it has to have found."""

from __future__ import annotations

from lmcache_stream.serving.doctor import DoctorOptions, Finding, diagnose
from lmcache_stream.serving.doctor.diagnosis import CHECKS
from lmcache_stream.testing import FakeEngine, Reply
from lmcache_stream.testing.fake_cache_server import FakeCacheServer
from tests.serving.doctor.stack import CHUNK, geometry_of


async def examined(options: DoctorOptions) -> dict[str, Finding]:
    findings = await diagnose(options)
    assert [finding.name for finding in findings] == [check.name for check in CHECKS]
    for finding in findings:
        assert finding.detail
        assert bool(finding.remedy) == (finding.status in ("fail", "warn")), finding
    return {finding.name: finding for finding in findings}


def the(found: dict[str, Finding], status: str) -> list[str]:
    return [name for name, finding in found.items() if finding.status == status]


def only_failure(found: dict[str, Finding], name: str, *words: str) -> None:
    """One cause makes one failure, and its finding says what was seen and what to change."""
    assert the(found, "fail") == [name], found
    said = f"{found[name].detail}\n{found[name].remedy}"
    for word in words:
        assert word in said


async def with_engine_fault(model: str, path: str, *replies: Reply, key: str | None = None) -> dict[str, Finding]:
    """What is found of an engine whose `path` answers with `replies`."""
    with FakeCacheServer(chunk_size=CHUNK) as server:
        server.serve(model, geometry_of(model))
        async with FakeEngine(root=model) as engine:
            engine.script(*replies, path=path)
            return await examined(
                DoctorOptions(
                    base_url=engine.base_url, kv_url=server.url, kv_http_url=server.http_url, api_key=key, timeout=5
                )
            )
