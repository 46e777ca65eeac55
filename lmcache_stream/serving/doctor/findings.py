"""What a check finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Blocked", "Fails", "Finding", "Result", "Status", "blocked_by", "has_failed", "passes", "warns"]

Status: TypeAlias = Literal["pass", "fail", "warn", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Args:
        name: The check.
        status: "pass"; "fail"; "warn": it works, but not as well as it could; "skip": not examined.
        detail: What was seen.
        remedy: What to change; empty where nothing is to be.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A finding without its name; `go_on` tells whether checks that need this one make sense."""

    status: Status
    detail: str
    remedy: str = ""
    go_on: bool = True


class Fails(Exception):
    """Ends a check."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.result: Result = Result("fail", detail, remedy, go_on=False)


class Blocked(Exception):
    """Ends a check that cannot be made without what another one would have found."""


def passes(detail: str) -> Result:
    """The result of a check that finds nothing to change."""
    return Result("pass", detail)


def warns(detail: str, remedy: str) -> Result:
    """The result of a check that finds what works, but not as well as it could."""
    return Result("warn", detail, remedy)


def blocked_by(*names: str) -> Result:
    """The result of a check that was not made, for want of what other checks find."""
    return Result("skip", f"needs: {', '.join(names)}", go_on=False)


def has_failed(findings: Sequence[Finding]) -> bool:
    """Whether a check failed."""
    return any(finding.status == "fail" for finding in findings)
