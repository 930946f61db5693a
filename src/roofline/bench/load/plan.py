"""What a load generator is told: one JSON file, so that it can run in a process, or on a machine, of its own."""

from pathlib import Path
from typing import Literal

import msgspec

from roofline.bench.load.events import Arrivals
from roofline.common.addresses import check_address
from roofline.common.errors import ConfigError
from roofline.common.files import cause_of

Route = Literal["completions", "chat"]


class Probe(msgspec.Struct, frozen=True):
    """A prompt whose greedy answer is known. expected: what the idle system answered."""

    prompt: str
    max_tokens: int
    expected: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the load generator.

    traffic, events: the files that it reads and writes; url: of the API, ending in /v1; further_urls: of further
    servers of the same model, which take requests in turn with it, each conversation one of them; first, requests:
    which requests of the traffic are sent, beginning again at its first one where it ends; seconds: after which no more
    are sent; timeout: seconds that a request may take.

    concurrency: workers of a closed loop, requests of a batch; rate: requests a second of the other arrivals, of a ramp
    the last, and rate_from its first; burstiness: shape of the gamma distribution (1 is Poisson, smaller is burstier);
    seed: of the arrivals; trace_speed: how much faster than recorded a trace is sent.

    unread: share of the requests beside which another client sends one and does not read its answer; unread_tokens: of
    such an answer, 0: as many as of the request beside it; unread_seconds: after which such a client gives up.

    probes: sent in turn among the requests, one before each `probe_every` of them; keep_text: of all answers.
    """

    traffic: str
    events: str
    url: str
    model: str
    arrivals: Arrivals
    further_urls: list[str] = []
    route: Route = "completions"
    first: int = 0
    requests: int = 1
    seconds: float = 3600.0
    timeout: float = 600.0
    concurrency: int = 1
    rate: float = 1.0
    rate_from: float = 0.0
    burstiness: float = 1.0
    seed: int = 0
    trace_speed: float = 1.0
    probes: list[Probe] = []
    probe_every: int = 16
    keep_text: bool = False
    unread: float = 0.0
    unread_tokens: int = 0
    unread_seconds: float = 120.0


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises ConfigError where it is none, or says what cannot be done."""
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=Plan)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {cause_of(error)}") from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no plan of a load: {error}") from error
    positive = ("requests", "seconds", "timeout", "concurrency", "rate", "burstiness", "trace_speed", "probe_every")
    for name in positive:
        if getattr(plan, name) <= 0:
            raise ConfigError(f"{path}: {name} is {getattr(plan, name)}; give a number above 0")
    if not 0 <= plan.unread <= 1 or plan.unread_tokens < 0 or plan.unread_seconds <= 0:
        raise ConfigError(
            f"{path}: unread is {plan.unread}, unread_tokens {plan.unread_tokens}, unread_seconds "
            f"{plan.unread_seconds}; give a share from 0 to 1, no negative count, and a time above 0"
        )
    for url in (plan.url, *plan.further_urls):
        check_address(url)
    return plan
