"""All faults, and what must come of them."""

from __future__ import annotations

from .cache_faults import CACHE_FAULTS
from .engine_faults import ENGINE_FAULTS
from .joint_faults import BATCH_FAULTS, JOINT_FAULTS
from .network_faults import NETWORK_FAULTS
from .outcome import Fault

__all__ = ["FAULTS"]

FAULTS: list[Fault] = [*ENGINE_FAULTS, *CACHE_FAULTS, *NETWORK_FAULTS, *JOINT_FAULTS, *BATCH_FAULTS]
