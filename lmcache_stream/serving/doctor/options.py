"""What `lmcache-stream doctor` is asked to examine."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_stream.addresses import check_address, shown
from lmcache_stream.errors import UsageError
from lmcache_stream.kvcache.mp.transport import schemes

__all__ = ["DoctorOptions"]


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is examined.

    Args:
        base_url: Address of the engine.
        kv_url: The cache server's request endpoint.
        kv_http_url: The same server's HTTP address.
        model: Name in requests to the engine; None: the only one that it serves.
        kv_model: Name in the cache; None: what the engine says that it loaded.
        api_key: The engine's; None: that of `OPENAI_API_KEY`, if it is set.
        timeout: Seconds that one check takes at most.
        probe: Whether the reading of the KV is to be proven, which takes a prompt of some 2,000 tokens.

    Raises:
        UsageError: A URL or the time-out cannot be right.
    """

    base_url: str
    kv_url: str
    kv_http_url: str
    model: str | None = None
    kv_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 120.0
    probe: bool = True

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise UsageError(f"timeout must be a number of seconds above 0, not {self.timeout:g}")
        check_address(self.kv_url, "--kv-url")
        check_address(self.kv_http_url, "--kv-http-url")
        if self.kv_url.partition("://")[0] not in schemes:
            known = ", ".join(f"{name}://" for name in schemes)
            raise UsageError(f"--kv-url {shown(self.kv_url)} is no cache server's: begin it with one of {known}")
        if not self.kv_http_url.startswith(("http://", "https://")):
            raise UsageError(f"--kv-http-url {shown(self.kv_http_url)} must begin with http:// or https://")
