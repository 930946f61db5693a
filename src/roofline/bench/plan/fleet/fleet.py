"""`roofline plan --fleet`: a fleet under each of its policies."""

from collections.abc import Callable
from dataclasses import dataclass

from roofline.backends.simulated.calibration import Calibration
from roofline.bench.plan.arrangements import Arrangement, arrangements, place_of
from roofline.bench.plan.assumptions import assumed
from roofline.bench.plan.fleet.exact import ExactFleet
from roofline.bench.plan.fleet.figures import FleetFigures
from roofline.bench.plan.fleet.lengths import Requests
from roofline.bench.plan.fleet.service import Service, fit_service
from roofline.bench.plan.fleet.simulate import Simulation
from roofline.bench.plan.fleet.spec import FleetSpec
from roofline.bench.plan.plan import shape_of
from roofline.common.errors import ConfigError

EXACT_REPLICAS = 64
Tell = Callable[[str], None]


@dataclass(frozen=True)
class FleetPlan:
    """The answer: of each pair of policies. service: None where every replica ran exactly."""

    spec: FleetSpec
    arrangement: Arrangement
    calibration: Calibration
    service: Service | None
    figures: list[FleetFigures]


def replica_of(spec: FleetSpec) -> tuple[Arrangement, Calibration]:
    """One replica of a fleet. Raises as `arrangements`, ConfigError where so many devices cannot share the model."""
    model, requests = spec.model, Requests(spec.traffic)
    place = place_of(model.chip, model.devices, model.memory)
    shape, config = shape_of(model.name, model.dtype, on_host=place.is_host)
    longest = int(requests.prompts.max() + requests.answers.max())
    ways = arrangements(shape, config, place, longest, (model.max_batch_tokens, model.max_running))
    chosen = [each for each in ways if each.devices == model.devices]
    if not chosen:
        could = ", ".join(str(each.devices) for each in ways)
        raise ConfigError(f"model.devices = {model.devices}: so many cannot share the model; {could} can")
    bits, is_host = chosen[0].weight_bits, place.is_host
    return chosen[0], assumed(model.reads, model.arithmetic, bits=bits, devices=model.devices, host=is_host)


def is_exact(spec: FleetSpec) -> bool:
    """Whether every replica runs the real scheduler."""
    fixed = all(each == "fixed" for each in spec.policies.scaling) and not spec.failures.hours_between
    return spec.method == "exact" or (spec.method == "auto" and fixed and spec.replicas.start <= EXACT_REPLICAS)


def plan_fleet(spec: FleetSpec, tell: Tell = lambda text: None) -> FleetPlan:
    """Simulate a fleet under each of its policies."""
    arrangement, calibration = replica_of(spec)
    policies = spec.policies
    if is_exact(spec):
        figures = []
        for routing in policies.routing:
            tell(f"{routing}: {spec.replicas.start} replicas, each with the real scheduler")
            figures.append(ExactFleet(spec, arrangement, calibration, routing).run())
        return FleetPlan(spec, arrangement, calibration, None, figures)
    tell("fitting a replica to runs of the real scheduler")
    requests = Requests(spec.traffic)
    service = fit_service(arrangement, calibration, requests.prompts, requests.answers)
    figures = []
    for scaling in policies.scaling:
        for routing in policies.routing:
            tell(f"{routing}, {scaling}")
            figures.append(Simulation(spec, service, routing, scaling).run())
    return FleetPlan(spec, arrangement, calibration, service, figures)
