"""`lmcache-stream doctor`: examines an engine and its cache server with real requests, and says what to change.

Each check is a small function of its own. One whose prerequisite failed is skipped, so that one cause makes one
failure. Requests go under scratch salts; the few chunks that they leave in the cache are evicted like any others.
"""

from __future__ import annotations

from lmcache_stream.serving.doctor.command import add_arguments, run
from lmcache_stream.serving.doctor.diagnosis import diagnose
from lmcache_stream.serving.doctor.findings import Finding
from lmcache_stream.serving.doctor.options import DoctorOptions

__all__ = ["DoctorOptions", "Finding", "add_arguments", "diagnose", "run"]
