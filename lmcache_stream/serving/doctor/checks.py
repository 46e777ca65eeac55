"""How a check is declared."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from lmcache_stream.serving.doctor.findings import Result

if TYPE_CHECKING:
    from lmcache_stream.serving.doctor.visit import Visit

__all__ = ["Check", "declare"]

Examine: TypeAlias = "Callable[[Visit], Awaitable[Result]]"


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Args:
        name: Its name, unique.
        examine: Does it.
        needs: Names of earlier checks without which it makes no sense.
        remedy: What to change where an error comes that `examine` does not explain itself.
        patient: Whether it may take the time-out of the options.
    """

    name: str
    examine: Examine
    needs: tuple[str, ...]
    remedy: str
    patient: bool


def declare(
    checks: list[Check], name: str, *, needs: Sequence[str] = (), remedy: str, patient: bool = False
) -> Callable[[Examine], Examine]:
    """Decorates the function that does a check, and puts the check at the end of `checks`."""

    def add(examine: Examine) -> Examine:
        checks.append(Check(name, examine, tuple(needs), remedy, patient))
        return examine

    return add
