"""The record of a measured point: one JSON object a line in a file of results.

A point is one system under one load. Every figure names its definition, every limit its assumptions, and what a reader
would need to measure the same again is in the point itself: traffic, load, client, machine, versions.
"""

from typing import Literal

import msgspec

from roofline.bench.load.events import Arrivals
from roofline.hardware.host_settings import HostSettings

SCHEMA = "bench.result/1"
INTERRUPTED = "interrupted"  # among the flags of a point that Ctrl-C ended before its load was sent
Kind = Literal["curve", "load", "sweep", "decode", "compare", "train", "plan", "fleet", "engine", "latency"]


class Figure(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A metric over the requests of a point, or a single value.

    definition: how it is computed, as a formula over a request's moments; unit: "ms", "tokens/s", "requests/s"...;
    n: values that it is taken over; value: of a metric that is one number (a throughput); mean, sd, p50 to p99: over
    the requests, None where n is too small for the percentile (fewer than 299 for p99); ci95: of `value`, else of p50.
    """

    definition: str
    unit: str
    n: int
    value: float | None = None
    mean: float | None = None
    sd: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    ci95: tuple[float, float] | None = None


class Device(msgspec.Struct, kw_only=True):
    """What the system ran on. sheet_*: of its data sheet; measured_*: on this device; 0: not known."""

    name: str
    vendor: str
    count: int = 1
    sheet_flops: float = 0.0
    sheet_bytes_per_s: float = 0.0
    sheet_source: str = ""
    measured_flops: float = 0.0
    measured_bytes_per_s: float = 0.0
    measured_at: str = ""
    watts: float = 0.0


class Host(msgspec.Struct, kw_only=True):
    """The machine. system: kernel and its version; load: of other programs, in cores, while nothing of ours ran;
    settings: how the kernel and the drivers of GPUs run it, None where nothing was measured on it."""

    chip: str
    cores: int
    memory_bytes: int
    system: str = ""
    python: str = ""
    load: float = 0.0
    settings: HostSettings | None = None


class System(msgspec.Struct, kw_only=True):
    """The system under test.

    label: what a reader calls it; target: how it was reached ("http://...", "engine:MODEL"); engine, version, options:
    the server's; model: its name; parameters, weight_bytes, formats: of the model where it is known; fingerprint: of
    our executables, which names weights and compiled code.
    """

    label: str
    target: str
    engine: str = ""
    version: str = ""
    options: dict[str, str] = {}
    model: str = ""
    parameters: int = 0
    weight_bytes: int = 0
    weight_formats: str = ""
    kv_format: str = ""
    replicas: int = 1
    devices_per_replica: int = 1
    fingerprint: str = ""


class Lengths(msgspec.Struct, kw_only=True):
    """Tokens of the requests, as measured."""

    mean: float
    p50: float
    p95: float
    most: int


class Workload(msgspec.Struct, kw_only=True):
    """What was sent. sha256: of the traffic file, of a preset that of its
    own number of requests; requests: in the point; temperature: of sampling."""

    name: str
    sha256: str
    requests: int
    prompt: Lengths
    answer: Lengths
    stop: str
    temperature: float = 0.0
    shared_prefix: float = 0.0
    prefix_cache: Literal["off", "cold", "warm", "unknown"] = "unknown"


class Load(msgspec.Struct, kw_only=True):
    """How it was sent. offered, achieved: requests a second that the plan says, that were sent; slip_p50_ms,
    slip_p99_ms: how much later than planned requests were sent."""

    arrivals: Arrivals
    concurrency: int | None = None
    offered: float | None = None
    achieved: float = 0.0
    slip_p50_ms: float = 0.0
    slip_p99_ms: float = 0.0


class Client(msgspec.Struct, kw_only=True):
    """The load generator, and its certificate: what the same client added against a server that computes nothing.

    cpu: share of a core that it used; ttft_added_ms, gap_added_ms: medians, ttft_added_ci: of the first; most_rate,
    most_streams: the highest load at which it kept its plan; trusted: whether this point lies within that.
    """

    version: str
    cpu: float = 0.0
    ttft_added_ms: float | None = None
    ttft_added_ci: tuple[float, float] | None = None
    gap_added_ms: float | None = None
    most_rate: float | None = None
    most_streams: int | None = None
    trusted: bool = False


class Window(msgspec.Struct, kw_only=True):
    """Which part of the run counts. method: how the warm-up was cut; order: of the systems, in turns."""

    method: str
    warm_up_s: float
    measured_s: float
    cool_down_s: float
    repeats: int = 1
    order: str = "A"


class Counts(msgspec.Struct, kw_only=True):
    """Requests by how they ended, and tokens. empty: that came to their end without text or reasoning; tokens_by: who
    counted them; miscounted: requests whose count of answer tokens differs by more than a tenth from what the
    tokenizer makes of the answer's text, None where that was not checked."""

    completed: int
    failed: int
    unfinished: int
    prompt_tokens: int
    answer_tokens: int
    empty: int = 0
    cached_tokens: int = 0
    tokens_by: Literal["server", "tokenizer", "engine", "chunks"] = "server"
    miscounted: int | None = None


class UnreadCounts(msgspec.Struct, kw_only=True):
    """Clients that did not read their answers: a load beside the point's requests, and in none of its figures.

    share: of the requests, that such a client came with; clients: that there were; closed_by_server, closed_by_client:
    whose connection it or we ended; answered: whose answer had come with its head; failed: that were refused, or had no
    connection.
    """

    share: float
    clients: int
    closed_by_server: int
    closed_by_client: int
    answered: int
    failed: int


class Limit(msgspec.Struct, kw_only=True):
    """The physical limit of the point's load: the least seconds for its requests at the roofs.

    bound: what takes longest there; share_of_sheet, share_of_measured: of the throughput that each of the two roofs
    allows, None where that roof is not known; assumptions: in words, such as how experts are read.
    """

    seconds: float
    bound: Literal["memory", "compute", "links"]
    flops: float
    weight_bytes: float
    kv_bytes: float
    tokens_per_s: float
    share_of_sheet: float | None = None
    share_of_measured: float | None = None
    assumptions: list[str] = []


class Energy(msgspec.Struct, kw_only=True):
    """Joules of the load, from a counter. source: which one; seconds: from the start of the process that sends the load
    to its end; joules_per_token: of all answers that came to their end, without what the idle machine takes."""

    source: Literal["nvml", "amdsmi", "rapl"]
    joules: float
    seconds: float
    idle_joules: float
    joules_per_token: float


class Cost(msgspec.Struct, kw_only=True):
    """Money. usd_per_hour: of all devices, with the source and the date of the price."""

    usd_per_hour: float
    source: str
    date: str
    usd_per_million_tokens: float


class Fidelity(msgspec.Struct, kw_only=True):
    """Probe prompts with known greedy answers among the load. probes: sent; equal: answered with exactly the text that
    the idle system gave."""

    probes: int
    equal: int
    reference: str


class Validity(msgspec.Struct, kw_only=True):
    """grade: "A" where nothing is missing that a reader needs to measure the same again, and down to "D"; flags: what
    is wrong or missing (INTERRUPTED, "too few requests for p99", "client used 92% of a core", "cache not known")."""

    grade: Literal["A", "B", "C", "D"]
    flags: list[str] = []


class Point(msgspec.Struct, kw_only=True):
    """A measured point. id: a hash of the rest; run: of all points of one command; kind: the command that measured it
    (points of `bench load` had "curve" before 2026-11-27; none are told apart by that); metrics: by name, such as
    "ttft"; events: path of the raw events beside the results, and their SHA-256; extra: what only this kind of point
    has."""

    id: str
    run: str
    kind: Kind
    preset: str
    started: str
    ended: str
    system: System
    host: Host
    devices: list[Device]
    workload: Workload | None
    load: Load | None
    client: Client | None
    window: Window
    counts: Counts | None
    metrics: dict[str, Figure]
    validity: Validity
    limit: Limit | None = None
    energy: Energy | None = None
    cost: Cost | None = None
    fidelity: Fidelity | None = None
    unread: UnreadCounts | None = None
    events: str | None = None
    events_sha256: str | None = None
    tags: list[str] = []
    extra: dict[str, float | int | str | bool | None] = {}
    schema: str = SCHEMA
