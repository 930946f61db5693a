"""Probes: prompts whose greedy answers of the idle system are known, sent among the load."""

from collections.abc import Callable
from pathlib import Path

from roofline.bench.load.events import Events
from roofline.bench.load.plan import Plan, Probe
from roofline.bench.results.point import Fidelity
from roofline.bench.traffic.traffic import Traffic, TrafficRequest, write_traffic
from roofline.common.errors import ConfigError

TOKENS = 24
PROMPTS = (
    "The colours of the rainbow, in their order, are",
    "Count from one to twenty in words:",
    "The capital of France is Paris. The capital of Italy is",
    "Once upon a time there was a lighthouse keeper who",
)


def answered_probes(plan: Plan, folder: Path, run_plan: Callable[[Plan], Events]) -> list[Probe]:
    """The probes with the answers that the idle system gives to them. plan: says where and how to ask; run_plan: runs
    plans.

    Raises ConfigError where the system does not answer them.
    """
    requests = [
        TrafficRequest(prompt=prompt, prompt_tokens=len(prompt.split()), max_tokens=TOKENS) for prompt in PROMPTS
    ]
    traffic = Traffic(name="probes", version=1, seed=0, stop="natural", source="ours", requests=requests)
    path = folder / "probes.jsonl"
    write_traffic(traffic, path)
    asked = Plan(
        traffic=str(path),
        events=str(folder / "probes-events.jsonl"),
        url=plan.url,
        model=plan.model,
        route=plan.route,
        arrivals="closed",
        requests=len(requests),
        keep_text=True,
        timeout=plan.timeout,
    )
    events = run_plan(asked)
    if events.head.interrupted:
        raise KeyboardInterrupt
    errors = [request.error for request in events.requests if request.error]
    if errors:
        raise ConfigError(f"the target does not answer a probe: {errors[0]}")
    answers = {request.request: request.text or "" for request in events.requests}
    return [Probe(prompt, TOKENS, answers.get(number, "")) for number, prompt in enumerate(PROMPTS)]


def fidelity(events: Events, probes: list[Probe]) -> Fidelity | None:
    """How many probes of a run were answered as the idle system did; None where none was answered."""
    answered = [request for request in events.requests if request.probe and request.completed]
    if not answered:
        return None
    equal = sum(request.text == probes[request.request].expected for request in answered)
    return Fidelity(probes=len(answered), equal=equal, reference="the same system's greedy answers while it was idle")
