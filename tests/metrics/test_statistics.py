from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_stream.errors import UsageError
from lmcache_stream.metrics import percentile


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
@settings(deadline=None)
def test_a_percentile_is_numpys_default(values: list[float], q: float) -> None:
    assert math.isclose(percentile(values, q), float(np.percentile(values, q)), rel_tol=1e-9, abs_tol=1e-6)


def test_what_has_no_percentile_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        percentile([], 50)
    with pytest.raises(UsageError, match="between 0 and 100"):
        percentile([1.0], 101)
