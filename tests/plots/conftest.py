from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@pytest.fixture
def ax() -> Axes:
    from matplotlib.figure import Figure

    return Figure().add_subplot()


@pytest.fixture
def pyplot_closed() -> Iterator[None]:
    from matplotlib import pyplot

    yield
    pyplot.close("all")
