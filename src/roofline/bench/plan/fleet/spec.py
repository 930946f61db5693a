"""The TOML file that describes a fleet."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from roofline.common.errors import ConfigError
from roofline.common.files import cause_of
from roofline.common.mistaken_files import unreadable
from roofline.deploy.scaling import ScalingTargets

Routing = Literal["round-robin", "least-loaded", "power-of-two", "prefix"]
Scaling = Literal["fixed", "utilisation", "queue", "latency"]
MOST_REPLICAS = 100_000
MOST_TOKENS = 1 << 20


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file. Keys that it does not have are refused."""


class ModelSpec(Section, frozen=True, kw_only=True):
    """What each replica runs. chip: "" is this machine; devices: of a replica; reads, arithmetic: shares of the roofs
    that are assumed, None: those of `roofline plan`."""

    name: str
    chip: str = ""
    dtype: str = ""
    devices: int = 1
    memory: float | None = None
    max_batch_tokens: int = 2048
    max_running: int = 256
    reads: float | None = None
    arithmetic: float | None = None


class Spread(Section, frozen=True, kw_only=True):
    """Lengths in tokens: log-normal of this mean, sigma the standard deviation of the logarithm, cut to 1 to `most`."""

    mean: float
    sigma: float = 0.0
    most: int = 4096


class TrafficSpec(Section, frozen=True, kw_only=True):
    """Requests of a fleet: Poisson at `rate` a second on average, which goes up and down by `swing` of it in a day and
    is highest at peak_hour of the simulated clock. Every prompt begins with one of `prefixes` beginnings of
    prefix_tokens, chosen by Zipf's law."""

    seconds: float
    rate: float
    prompt: Spread
    answer: Spread
    swing: float = 0.0
    peak_hour: float = 14.0
    prefixes: int = 0
    prefix_tokens: int = 0
    seed: int = 0


class ReplicaSpec(Section, frozen=True, kw_only=True):
    """How many there are. start: at the beginning; least, most: that scaling keeps to (0: as `start`); start_seconds:
    until a new one answers; most_waiting: requests that wait at a replica, beyond which it refuses."""

    start: int
    least: int = 0
    most: int = 0
    start_seconds: float = 120.0
    most_waiting: int = 256


class FailureSpec(Section, frozen=True, kw_only=True):
    """hours_between: of running time of a replica between two failures, 0: none fail; repair_seconds: until it answers
    again. What it was computing is sent again, to others."""

    hours_between: float = 0.0
    repair_seconds: float = 300.0


class PolicySpec(Section, frozen=True, kw_only=True):
    """The policies that are compared, each routing with each scaling, all of them settings of `deploy/scaling.py`.

    utilisation: of the requests that a replica computes at the same time, which every scaling aims at; queue: waiting
    requests for each replica at which scaling by the queue adds some; queue_seconds, first_token_seconds: how long the
    oldest waiting request, and 95 % of the first tokens, may take under scaling by latency; calm_seconds: after which
    it ends replicas; interval: seconds between two decisions.
    """

    routing: tuple[Routing, ...] = ("round-robin",)
    scaling: tuple[Scaling, ...] = ("fixed",)
    utilisation: float = 0.6
    queue: float = 0.5
    queue_seconds: float = 1.0
    first_token_seconds: float | None = None
    calm_seconds: float = 60.0
    interval: float = 30.0


class FleetSpec(Section, frozen=True, kw_only=True):
    """A fleet. slice_seconds: of the simulation, None: as the requests' time allows; method: "exact" runs the real
    scheduler of every replica, "model" a model of one that was fitted to it, "auto" the first up to 64 replicas that
    neither scale nor fail; price: USD for an hour of a device."""

    name: str
    model: ModelSpec
    traffic: TrafficSpec
    replicas: ReplicaSpec
    failures: FailureSpec = FailureSpec()
    policies: PolicySpec = PolicySpec()
    slice_seconds: float | None = None
    method: Literal["auto", "exact", "model"] = "auto"
    price: float | None = None

    @property
    def least(self) -> int:
        return self.replicas.least or self.replicas.start

    @property
    def most(self) -> int:
        return self.replicas.most or self.replicas.start


def targets_of(spec: FleetSpec, scaling: Scaling) -> ScalingTargets | None:
    """Return what a kind of scaling holds a fleet to; None for a fleet that is not scaled."""
    policies = spec.policies
    bounds = ScalingTargets(min_replicas=spec.least, max_replicas=spec.most, utilisation=policies.utilisation)
    at_once = replace(bounds, queue_seconds=None, calm_seconds=0.0, settle_seconds=0.0, shrinkage=1.0)
    if scaling == "fixed":
        return None
    if scaling == "utilisation":
        return at_once
    if scaling == "queue":  # in many small steps: an interval is longer than most replicas take to start
        return replace(at_once, waiting=policies.queue, growth=0.1, shrinkage=0.05)
    return replace(
        bounds,
        queue_seconds=policies.queue_seconds,
        first_token_seconds=policies.first_token_seconds,
        calm_seconds=policies.calm_seconds,
    )


def read_spec(path: Path) -> FleetSpec:
    """The fleet in a file. Raises ConfigError, naming file and key, for what is no fleet."""
    try:
        values = tomllib.loads(path.read_text("utf-8"))
        spec = msgspec.convert(values, FleetSpec)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {cause_of(error)}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise unreadable(path, f"{path} is not TOML: {error}; docs/how-to/plan.md shows such a file") from error
    except msgspec.ValidationError as error:
        raise unreadable(path, f"{path} describes no fleet: {error}; docs/how-to/plan.md lists the keys") from error
    for fits, key, remedy in _rules(spec):
        if not fits:
            raise ConfigError(f"{path}: {key} cannot be used: {remedy}")
    return spec


def _rules(spec: FleetSpec) -> list[tuple[bool, str, str]]:
    """What the types do not say: whether it holds, of which key, what to give."""
    traffic, replicas, policies, model = spec.traffic, spec.replicas, spec.policies, spec.model
    rules = [
        (0 < traffic.seconds <= 31 * 86400, "traffic.seconds", "give more than 0, and at most a month"),
        (0 < traffic.rate <= 1e6, "traffic.rate", "give more than 0 requests a second, and at most a million"),
        (0 <= traffic.swing < 1, "traffic.swing", "give a share of the rate, from 0 to below 1"),
        (0 <= traffic.peak_hour < 24, "traffic.peak_hour", "give an hour from 0 to below 24"),
        (0 <= traffic.prefixes <= 1 << 20, "traffic.prefixes", "give 0 to 1,048,576"),
        ((traffic.prefixes > 0) == (traffic.prefix_tokens > 0), "traffic.prefix_tokens", "give it with prefixes"),
        (
            traffic.prefix_tokens < traffic.prompt.most,
            "traffic.prefix_tokens",
            "give less than prompt.most",
        ),
        (1 <= replicas.start <= MOST_REPLICAS, "replicas.start", f"give 1 to {MOST_REPLICAS:,}"),
        (1 <= spec.least <= replicas.start, "replicas.least", "give at least 1, and at most replicas.start"),
        (replicas.start <= spec.most <= MOST_REPLICAS, "replicas.most", f"give replicas.start to {MOST_REPLICAS:,}"),
        (replicas.start_seconds >= 0, "replicas.start_seconds", "give at least 0"),
        (1 <= replicas.most_waiting <= 1 << 16, "replicas.most_waiting", "give 1 to 65,536"),
        (spec.failures.hours_between >= 0, "failures.hours_between", "give at least 0"),
        (spec.failures.repair_seconds >= 0, "failures.repair_seconds", "give at least 0"),
        (bool(policies.routing), "policies.routing", "name at least one"),
        (bool(policies.scaling), "policies.scaling", "name at least one"),
        (0.01 <= policies.utilisation <= 1, "policies.utilisation", "give a share of at least 0.01"),
        (policies.queue > 0, "policies.queue", "give more than 0"),
        (policies.queue_seconds > 0, "policies.queue_seconds", "give more than 0 seconds"),
        (
            policies.first_token_seconds is None or policies.first_token_seconds > 0,
            "policies.first_token_seconds",
            "give more than 0 seconds",
        ),
        (policies.calm_seconds >= 0, "policies.calm_seconds", "give at least 0 seconds"),
        (policies.interval > 0, "policies.interval", "give more than 0 seconds"),
        (1 <= model.devices <= 64, "model.devices", "give 1 to 64"),
        (model.memory is None or 1 <= model.memory <= 65_536, "model.memory", "give 1 to 65,536 GB"),
        (model.reads is None or 0 < model.reads <= 1, "model.reads", "give a share above 0, at most 1"),
        (model.arithmetic is None or 0 < model.arithmetic <= 1, "model.arithmetic", "give a share above 0, at most 1"),
        (1 <= model.max_running <= 4096, "model.max_running", "give 1 to 4,096"),
        (model.max_batch_tokens >= model.max_running, "model.max_batch_tokens", "give at least max_running"),
        (spec.slice_seconds is None or 0.001 <= spec.slice_seconds <= 60, "slice_seconds", "give 0.001 to 60"),
        (spec.price is None or spec.price >= 0, "price", "give at least 0"),
    ]
    for name, spread in (("prompt", traffic.prompt), ("answer", traffic.answer)):
        rules += [
            (1 <= spread.mean <= spread.most, f"traffic.{name}.mean", "give 1 to `most`"),
            (0 <= spread.sigma <= 3, f"traffic.{name}.sigma", "give 0 to 3"),
            (spread.most <= MOST_TOKENS, f"traffic.{name}.most", f"give at most {MOST_TOKENS:,}"),
        ]
    fixed = all(each == "fixed" for each in policies.scaling) and not spec.failures.hours_between
    rules.append((spec.method != "exact" or fixed, "method", '"exact" has neither scaling nor failures: give "model"'))
    return rules
