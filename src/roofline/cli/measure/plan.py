"""roofline plan: a model on devices that are not here: what fits, how fast it would be, what it would cost."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import MOST_MEMORY, AsJson, KvCacheDtype
from roofline.cli.output import check_output, print_json
from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError
from roofline.common.options import Option, Options, option

if TYPE_CHECKING:
    from roofline.backends.simulated.calibration import Calibration
    from roofline.bench.plan.arrangements import Place
    from roofline.bench.plan.closed_loop import Lengths
    from roofline.bench.plan.plan import Calibrate, Price

MOST_CONCURRENCY = 1_000_000
DEVICES, LOAD, ASSUMED, COST = "Devices", "Load", "What has to be assumed", "Cost"


@dataclass(frozen=True)
class PlanOptions(Options):
    """What is planned for. Raises ConfigError, which names the option."""

    dtype: str = option("", "Format of the weights (f16, fp8, q4_k_m, ...). Default: as the model has them.")
    chip: str = option("", "A product, such as MI300X. Default: this machine, at its measured roofs.", topic=DEVICES)
    count: int = option(1, "Devices in all.", minimum=1, maximum=100_000, topic=DEVICES)
    devices: int | None = option(
        None, "Devices that share a copy of the model. Default: each number that fits.",
        flags=("--devices", "--tp"), minimum=1, topic=DEVICES,
    )  # fmt: skip
    memory: float | None = option(
        None, "GB of memory of the chip, where it is sold with several sizes or with none.",
        minimum=1, maximum=MOST_MEMORY, topic=DEVICES,
    )  # fmt: skip
    per_host: int | None = option(
        None, "Devices of a host; more share a copy over the network. Default: 8.", minimum=1, topic=DEVICES
    )
    concurrency: str = option("1,8,64", "Requests at a time, with commas.", topic=LOAD)
    prompt: int | None = option(None, "Tokens of each prompt. Default: 512.", minimum=1, topic=LOAD)
    answer: int | None = option(None, "Tokens of each answer. Default: 256.", minimum=1, topic=LOAD)
    traffic: Path | None = option(None, "A traffic file, whose lengths are taken in turn instead.", topic=LOAD)
    max_batch_tokens: int | None = option(
        None, "Tokens that are computed in one step. Default: 512; on a GPU 2,048.", minimum=1, topic=LOAD
    )
    max_running: int | None = option(
        None, "Answers that a copy computes at the same time. Default: 64; on a GPU 256.",
        minimum=1, maximum=1024, topic=LOAD,
    )  # fmt: skip
    reads: float | None = option(
        None,
        "Share of the bandwidth that steps reach. Default: 0.62, of 8-bit weights 0.52, of 4 bits 0.56, on a CPU 0.47.",
        minimum=0.01,
        maximum=1.0,
        topic=ASSUMED,
    )
    arithmetic: float | None = option(
        None,
        "Share of the rate of products that steps reach. Default: 0.55, of weights of 4 bits 0.22, on a CPU 0.57.",
        minimum=0.01,
        maximum=1.0,
        topic=ASSUMED,
    )
    step_us: float | None = option(None, "Microseconds that each step takes beside these.", minimum=0, topic=ASSUMED)
    row_us: float | None = option(
        None, "Microseconds for each sequence that a step makes a token of, beside these.", minimum=0, topic=ASSUMED
    )
    link_us: float | None = option(
        None,
        "Microseconds of each exchange among devices, beside its bytes. Default: 25 for each doubling of them.",
        minimum=0,
        topic=ASSUMED,
    )
    network: float | None = option(
        None,
        "GB/s that a device receives from devices of other hosts. Default: 50, a port of 400 Gbit/s for each.",
        minimum=0.01,
        maximum=10_000,
        topic=ASSUMED,
    )
    calibrate: bool = option(
        False, "Measure a few steps of the model on this machine first, and take the shares from them.", topic=ASSUMED
    )
    price: float | None = option(None, "USD for an hour of one device.", minimum=0, topic=COST)
    price_source: str = option("", "Where that price is from; it is kept in the results.", topic=COST)


def command(
    options: PlanOptions,
    model: Annotated[str, Argument("As of `roofline info`: a path, a name, or the name of a shape.")] = "",
    fleet: Annotated[Path | None, Option("Simulate the fleet that this TOML file describes instead.")] = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    as_json: AsJson = False,
    out: Annotated[
        Path | None, Option("Also append the points to this file of results.", flags=("--out", "-o"))
    ] = None,
) -> None:
    """Plan a model on devices that are not here: memory, arrangements, the curve to expect, cost.

    The real scheduler runs on a virtual clock, which each step moves by its least time at the roofs over the share of
    them that is assumed, and printed. Nothing is downloaded, and no weights are read.
    """
    check_output(out)
    if fleet is not None:
        from roofline.cli.measure.plan_fleet import run

        if model or options.changes():
            raise ConfigError("--fleet FILE says model, devices and load itself: leave the other options out")
        run(fleet, as_json, out)
        return
    if not model:
        raise ConfigError("name a model to plan for, such as llama-3.1-405b, or a fleet (--fleet FILE)")
    from roofline.bench.plan.plan import Case, plan
    from roofline.cli.measure.plan_text import record, show

    _check(options)
    place = _place(options)
    lengths, workload, sha256 = _load(options)
    case = Case(
        model=model,
        dtype=options.dtype,
        chip=options.chip,
        count=options.count,
        concurrency=_concurrency(options.concurrency),
        lengths=lengths,
        workload=workload,
        step=_step(options),
        devices=options.devices,
        memory=options.memory,
        kv_cache_dtype=kv_cache_dtype,
        price=_price(options),
        workload_sha256=sha256,
    )
    answer = plan(case, place, _calibration(options, model, kv_cache_dtype), _tell)
    print_json(record(answer), indent=1) if as_json else show(answer)
    if out is not None:
        from roofline.bench.plan.points import points_of
        from roofline.bench.results.store import append_points
        from roofline.common.units import now_utc

        append_points(points_of(answer, f"plan {now_utc()}"), out)


def _check(options: PlanOptions) -> None:
    for name in ("memory", "reads", "arithmetic"):
        if options.calibrate and getattr(options, name) is not None:
            raise ConfigError(f"--calibrate measures what --{name} would say: leave one of them out")
    if not options.chip:
        if options.count > 1 or options.memory is not None or options.per_host is not None:
            raise ConfigError("--count, --memory and --per-host are of a chip: name one with --chip")
    elif options.calibrate:
        raise ConfigError("--calibrate measures this machine: leave --chip out, or give --reads and --arithmetic")
    if options.price_source and options.price is None:
        raise ConfigError("--price-source is of a price: give one with --price")


def _place(options: PlanOptions) -> "Place":
    from roofline.bench.plan.arrangements import IN_HOST, NETWORK, place_of

    in_host = options.per_host or IN_HOST
    network = NETWORK if options.network is None else options.network * 1e9
    if options.network is not None and options.count <= in_host:
        raise ConfigError(f"--network is of devices of several hosts, and {options.count} are of one (--per-host)")
    return place_of(options.chip, options.count, options.memory, in_host, network)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _concurrency(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"concurrency={text!r} cannot be used: give whole numbers of at least 1, with commas")
    concurrency = tuple(int(word) for word in words)
    if max(concurrency) > MOST_CONCURRENCY:
        raise ConfigError(f"concurrency={text!r} cannot be used: give 1 to {MOST_CONCURRENCY:,} requests at a time")
    return concurrency


def _load(options: PlanOptions) -> "tuple[tuple[Lengths, ...], str, str]":
    """Lengths of the requests, their name, the hash of the traffic."""
    from roofline.bench.plan.closed_loop import Lengths

    if options.traffic is None:
        prompt, answer = options.prompt or 512, options.answer or 256
        return (Lengths(prompt, answer),), f"{prompt}+{answer}", ""
    if options.prompt or options.answer:
        raise ConfigError("--traffic says how long prompts and answers are: leave --prompt and --answer out")
    from roofline.bench.traffic.traffic import read_traffic

    traffic = read_traffic(options.traffic)
    if not traffic.requests:
        raise ConfigError(f"{options.traffic} has no requests: name other traffic")
    lengths = tuple(Lengths(each.prompt_tokens, each.max_tokens) for each in traffic.requests)
    return lengths, f"{traffic.name}@{traffic.version}", traffic.sha256


def _step(options: PlanOptions) -> tuple[int, int]:
    from roofline.backends.simulated.backend import THIS_MACHINE, step_of

    tokens, running = step_of(options.chip or THIS_MACHINE)
    running = options.max_running or running
    return max(options.max_batch_tokens or tokens, running), running


def _price(options: PlanOptions) -> "Price | None":
    from roofline.bench.plan.plan import Price
    from roofline.common.units import now_utc

    if options.price is None:
        return None
    return Price(options.price, options.price_source or "as asked for", now_utc()[:10])


def _calibration(options: PlanOptions, model: str, kv_cache_dtype: str) -> "Calibration | Calibrate":
    from roofline.bench.plan.assumptions import assumed

    if options.calibrate:
        from roofline.bench.plan.calibrate import calibrate

        return calibrate(model, kv_cache_dtype, _tell)
    asked_for = options.reads, options.arithmetic, options.step_us, options.row_us, options.link_us
    return lambda each: assumed(*asked_for, bits=each.weight_bits, devices=each.devices, host=each.place.is_host)
