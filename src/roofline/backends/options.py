"""The options of loading a model: of `roofline.bundle.load`, of `LLM`, and of commands that run a model."""

from dataclasses import dataclass
from typing import Literal

from roofline.backends import table
from roofline.common.errors import UnsupportedError
from roofline.common.options import Options, declared, option

DEFAULT_MODEL = "smollm2-135m"
MAX_ADAPTERS = 256
GUESSING_BACKENDS = ("cpu", "reference")  # that run a model's layer that guesses further tokens
COMPUTE, NUMBERS, MEMORY = "What computes", "Numbers and exactness", "Memory"
BATCH, PARALLEL, MODEL = "Size of a step", "Several ranks", "Model"


@dataclass(frozen=True)
class LoadOptions(Options):
    """Options of loading a model. Raises ConfigError and UnsupportedError, with cause and remedy."""

    backend: str = option(
        "cpu",
        "What computes; reference is torch, slow and simple; simulated computes nothing, and tells times of a clock of "
        "its own.",
        choices=table.names,
        topic=COMPUTE,
    )
    device: str = option(
        "auto",
        "GPU: amd:0, nvidia:1, a product or an architecture (see `roofline doctor`). auto: the first usable one. Of "
        "simulated: a product, such as MI300X; auto: this machine's CPU.",
        topic=COMPUTE,
        backends=("gpu", "simulated"),
    )
    threads: int | None = option(
        None, "Compute threads, of all ranks and replicas together. Default: the usable cores.",
        minimum=1, unit="threads", topic=COMPUTE, backends=("cpu", "reference"),
    )  # fmt: skip
    isa: str | None = option(
        None, "Instruction set: avx512, avx2, neon, portable. Default: the best of this chip.",
        topic=COMPUTE, backends=("cpu",),
    )  # fmt: skip
    graphs: bool = option(
        True, "Capture decode steps as device graphs and replay them; off to measure what that brings.",
        topic=COMPUTE, backends=("gpu",), elsewhere="ignored",
    )  # fmt: skip
    tuned: bool = option(
        True, "Use the kernel variants that `roofline tune` found for this model on this machine.",
        topic=COMPUTE, backends=("cpu", "gpu"), elsewhere="ignored",
    )  # fmt: skip
    verify: bool = option(
        True, "Check the chosen kernels against the reference on the file's own bytes.",
        topic=COMPUTE, backends=("cpu",), elsewhere="ignored",
    )  # fmt: skip
    check_weights: Literal["later", "first", "off"] = option(
        "later",
        "When a bundle's weights are compared with their hash. later: in the background, from 5 s after loading "
        "on, which a short command does not live to see; first: before it answers.",
        topic=COMPUTE, backends=("cpu",), elsewhere="ignored",
    )  # fmt: skip
    exact: bool = option(
        False, "Results do not depend on what else is in a step: slower on a GPU, true anyway elsewhere.",
        topic=NUMBERS, backends=("gpu",), elsewhere="ignored",
    )  # fmt: skip
    activations: Literal["auto", "fp8"] = option(
        "auto",
        "fp8: where weights are fp8, what is multiplied with them is rounded to fp8 too, with a scale for each row. "
        "auto: the weights are widened to 16 bits, exactly.",
        topic=NUMBERS,
        backends=("gpu",),
    )
    arithmetic: Literal["cpu", "plain"] = option(
        "cpu", "What the reference computes in: with the cpu backend's roundings, or plain float32 throughout.",
        topic=NUMBERS, backends=("reference",),
    )  # fmt: skip
    kv_cache_dtype: str = option(
        "auto",
        "Format of the key-value cache. auto: bf16, on a GPU the model's 16 bits. Half the bytes: int8, not on a GPU; "
        "fp8, on GPUs that have it.",
        choices=("auto", "bf16", "int8", "fp8", "f16"),
        topic=MEMORY,
    )
    cache_tokens: int | None = option(
        None,
        "Tokens that the key-value cache holds. Default: 16,384, or what a quarter of the free memory holds if less; "
        "on a GPU what its memory holds.",
        minimum=1,
        unit="tokens",
        topic=MEMORY,
    )
    state_slots: int | None = option(
        None,
        "Sequences whose recurrent state is kept, those that are computed among them; of models without such state "
        "none. Default: as many as take the bytes of the key-value cache, and 2 more than max_running at least; on a "
        "GPU a quarter more than max_running.",
        minimum=1, unit="slots", topic=MEMORY, backends=("cpu", "reference", "gpu"), for_draft=False,
    )  # fmt: skip
    offload: int | Literal["auto"] = option(
        0, "Layers whose weights stay in the host's memory and are copied to the GPU in each step. auto: as few as it "
        "takes for the rest to fit.",
        minimum=0, unit="layers", topic=MEMORY, backends=("gpu",),
    )  # fmt: skip
    max_model_len: int | None = option(
        None, "Longest prompt plus answer. Default: the model's own, cut to the cache.",
        flags=("--max-model-len", "--context"), minimum=1, unit="tokens", topic=MEMORY, for_draft=False,
    )  # fmt: skip
    max_running: int | None = option(
        None, "Answers that are computed at the same time. Default: 64; on a GPU 256.",
        minimum=1, unit="answers", topic=BATCH,
    )  # fmt: skip
    max_batch_tokens: int | None = option(
        None, "Tokens that are computed in one step. Default: 512; on a GPU 2,048.",
        minimum=1, unit="tokens", topic=BATCH,
    )  # fmt: skip
    draft_tokens: int = option(
        0, "Longest draft of a sequence that a step verifies; follows from speculate_tokens.",
        minimum=0, unit="tokens", topic=BATCH, for_draft=False, command_line=False,
    )  # fmt: skip
    guesses: bool = option(
        False, "Load the model's layer that guesses further tokens; follows from speculate.",
        topic=MODEL, for_draft=False, command_line=False,
    )  # fmt: skip
    max_adapters: int | None = option(
        None,
        "LoRA adapters that may be loaded at the same time, also while they are served. 0: none, and the model is "
        "computed without places for them. Default: as many as a server is started with.",
        minimum=0, maximum=MAX_ADAPTERS, unit="adapters", topic=MODEL, for_draft=False,
    )  # fmt: skip
    max_adapter_rank: int = option(
        64, "Largest rank of an adapter; 64 at most on a GPU.", minimum=1, maximum=512, unit="ranks", topic=MODEL,
        for_draft=False,
    )  # fmt: skip
    tensor_parallel: int = option(
        1, "Ranks, each a process, that share each layer.",
        flags=("--tensor-parallel", "--tp"), minimum=1, unit="ranks", topic=PARALLEL, for_draft=False,
    )  # fmt: skip
    pipeline_parallel: int = option(
        1, "Stages that share the layers.",
        flags=("--pipeline-parallel", "--pp"), minimum=1, unit="stages", topic=PARALLEL,
        backends=("gpu", "reference"), instead=("tensor_parallel",), for_draft=False,
    )  # fmt: skip
    weights: str | None = option(
        None,
        "random:SEED[:FORMAT] runs the model's configuration on random weights; a folder with a config.json is enough, "
        "with a tokenizer.json for texts.",
        topic=MODEL,
        for_draft=False,
    )

    def __post_init__(self) -> None:
        table.require(self.backend)
        super().__post_init__()
        for name, about in declared(type(self)).items():
            if name != "max_adapters" or self.max_adapters:  # no adapters are there on every backend
                about.check_backend(getattr(self, name), self.backend)
        if self.offload != 0 and self.ranks > 1:
            raise UnsupportedError("offload on several ranks", "what a rank copies holds up the others", ("offload=0",))
        if self.guesses and self.backend not in GUESSING_BACKENDS:
            reason = "the rows that its layer goes on from are handed over on the host"
            raise UnsupportedError(f"speculate='mtp' on backend {self.backend!r}", reason, ("speculate='ngram'",))
        if self.guesses and self.pipeline_parallel > 1:
            reason = "its layer goes on from rows of the last stage, and the engine is with the first"
            instead = ("pipeline_parallel=1, with tensor_parallel", "speculate='ngram'")
            raise UnsupportedError("speculate='mtp' on several stages", reason, instead)
        if self.max_adapters and self.ranks > 1:
            raise UnsupportedError("adapters on several ranks", "only whole matrices are adapted", ("max_adapters=0",))

    @property
    def ranks(self) -> int:
        """Processes, or devices, that share the model."""
        return self.tensor_parallel * self.pipeline_parallel
