"""Runs the checks against a server, one after the other."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import httpx

from roofline.bench.conform.checks import CHECKS, Check
from roofline.bench.conform.client import Missing, Server, Skipped, Violation
from roofline.bench.conform.packages.checks import PACKAGE_CHECKS

Outcome = Literal["pass", "fail", "missing", "skipped"]
ALL_CHECKS: tuple[Check, ...] = (*CHECKS, *PACKAGE_CHECKS)


@dataclass(frozen=True)
class CheckFinding:
    """What came of a check. promise: in a sentence; detail: what was seen, or what is wrong; seconds: it took."""

    check: str
    promise: str
    outcome: Outcome
    detail: str
    seconds: float


def conform(server: Server, names: tuple[str, ...] = ()) -> Iterator[CheckFinding]:
    """The findings of the checks with these names, or of all, as they come."""
    server.find_model()
    for check in ALL_CHECKS:
        if not names or check.__name__ in names:
            yield _finding(server, check)


def _finding(server: Server, check: Check) -> CheckFinding:
    started = time.monotonic()
    outcome: Outcome = "pass"
    try:
        detail = check(server)
    except Missing as error:
        outcome, detail = "missing", str(error)
    except Skipped as error:
        outcome, detail = "skipped", str(error)
    except Violation as error:
        outcome, detail = "fail", str(error)
    except httpx.TimeoutException:
        outcome, detail = "fail", f"no answer within {server.seconds:g} s"
    except httpx.HTTPError as error:
        outcome, detail = "fail", f"the connection broke: {type(error).__name__}: {error}"
    promise = " ".join((check.__doc__ or "").split())
    return CheckFinding(check.__name__.replace("_", " "), promise, outcome, detail, time.monotonic() - started)
