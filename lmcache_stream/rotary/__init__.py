"""Rotary positions: a model's frequencies, and moving keys from one position to another.

Rotary position embedding (RoPE, Su et al. 2021, arXiv:2104.09864) turns pairs of a key's values by an angle that grows
with the token's position. A key that moves from one position to another is turned by the difference of both angles;
scaling factors that a model applied to its keys (YaRN's attention factor) stay in them and are not applied again.
"""

from __future__ import annotations

from lmcache_stream.rotary.rotary import Rotary
from lmcache_stream.rotary.turning import mean_rotation, rerotate, rerotate_

__all__ = ["Rotary", "mean_rotation", "rerotate", "rerotate_"]
