from __future__ import annotations

import torch

from lmcache_stream.kvcache.mp.readings import readings


def test_readings_where_nothing_is_known() -> None:
    packed = torch.empty(1, 4, 64, 2 * 128)
    assert {(r.codec.name, r.codec.heads, r.codec.head_dim, r.codec.block_size) for r in readings(packed, None)} == {
        ("fused", 2, 64, None),
        ("fused", 1, 128, None),
        ("fused", 4, 32, None),
        ("cpu-packed", 2, 64, 32),
        ("cpu-packed", 1, 128, 32),
        ("cpu-packed", 4, 32, 32),
        ("cpu-packed", 2, 64, 64),
        ("cpu-packed", 1, 128, 64),
        ("cpu-packed", 4, 32, 64),
        ("mla", 1, 256, None),
    }
    assert {r.codec.name for r in readings(torch.empty(2, 4, 64, 128), None)} == {"split"}
