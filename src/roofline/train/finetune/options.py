"""The options of a fine-tuning run, and the presets that stand for published ones."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from roofline.common.errors import ConfigError
from roofline.common.options import Options, declared, option

TOPIC_DATA, TOPIC_ADAPTER, TOPIC_RUN, TOPIC_AFTER = "Data", "What is trained", "The run", "Afterwards"
BATCH, RATE = "global_train_batch_size", "optimizer.lr"  # keys of a configuration
BASES = ("bf16", "f32", "stored", "nf4", "q8_0", "q4_1")
METHODS = ("lora", "dora", "full")
OF_ADAPTERS = ("rank", "alpha", "rslora", "targets", "base")  # options that say nothing where all is trained
SAMPLE_FORMS = ("messages", "sharegpt", "pubmedqa", "alpaca", "completion", "instruct", "question", "icl", "text")
SCHEDULES = {
    "cosine": "cosine_with_warmup",
    "linear": "linear_decay_with_warmup",
    "constant": "constant_with_warmup",
}


@dataclass(frozen=True)
class FinetunePreset:
    """Published settings. values: of options; notes: what of them is otherwise here."""

    values: Mapping[str, object]
    notes: tuple[str, ...] = ()


PRESETS = {
    "dell2024": FinetunePreset(
        {"max_seq_len": 512, "steps": 200, "batch": 16, "precision": "fp16"},
        ("its rank, targets and learning rate were not published: those here are this command's own",),
    ),
    "amd2024": FinetunePreset(
        {
            **{"rank": 8, "alpha": 8.0, "targets": "q_proj,v_proj", "lr": 4e-5, "schedule": "constant"},
            **{"steps": 250, "batch": 4},
        },
        ("it had a dropout of 0.1 in the adapter, here there is none",),
    ),
}


@dataclass(frozen=True)
class FinetuneOptions(Options):
    """How a model is fine-tuned."""

    format: str | None = option(
        None, "The form of the data. Default: told from its keys.", choices=SAMPLE_FORMS, topic=TOPIC_DATA
    )
    show: int = option(0, "Only show so many samples, with what is trained on in colour.", minimum=0, topic=TOPIC_DATA)
    split: str | None = option(None, "Of a data set with several, train by default.", topic=TOPIC_DATA)
    eval_share: float = option(
        0.05, "Part of the samples that is kept apart for evaluation.", minimum=0, maximum=0.9, topic=TOPIC_DATA
    )
    eval: Path | None = option(
        None, "A file or folder of samples to evaluate on, of any form, instead of a share.", topic=TOPIC_DATA
    )
    max_seq_len: int = option(1024, "Tokens of a row, and most tokens of a sample.", minimum=8, topic=TOPIC_DATA)
    pack: bool = option(True, "Put several samples into a row, none of which sees another.", topic=TOPIC_DATA)
    drop_long: bool = option(False, "Leave out samples longer than a row instead of cutting them.", topic=TOPIC_DATA)
    method: str = option("lora", "What is trained.", choices=METHODS, topic=TOPIC_ADAPTER, key="adapter.method")
    rank: int = option(16, "Rank of the adapter's matrices.", minimum=1, topic=TOPIC_ADAPTER, key="adapter.rank")
    alpha: float = option(32.0, "The adapter is scaled by alpha / rank.", topic=TOPIC_ADAPTER, key="adapter.alpha")
    rslora: bool = option(False, "Scale by alpha / sqrt(rank) instead.", topic=TOPIC_ADAPTER)
    targets: str = option(
        "all-linear",
        "Matrices with an adapter: all-linear, or names such as q_proj,v_proj.",
        topic=TOPIC_ADAPTER,
        key="adapter.targets",
    )
    base: str = option(
        "bf16", "How the model's own weights are kept.", choices=BASES, topic=TOPIC_ADAPTER, key="adapter.base"
    )
    out: Path | None = option(
        None, "The run's folder. Default: runs/MODEL-DATA.", flags=("--out", "-o"), topic=TOPIC_RUN, key="run_folder"
    )
    preset: str | None = option(
        None, "Published settings, in place of defaults.", choices=tuple(PRESETS), topic=TOPIC_RUN
    )
    epochs: float | None = option(None, "Times that each sample is seen. Default: 3.", topic=TOPIC_RUN)
    steps: int | None = option(None, "Steps, instead of epochs.", minimum=1, topic=TOPIC_RUN)
    batch: int | None = option(
        None,
        "Rows of a step. Default: 16, fewer where small data would make fewer than 100 steps.",
        minimum=1,
        topic=TOPIC_RUN,
        key=BATCH,
    )
    lr: float | None = option(
        None, "Learning rate. Default: 2e-4, or 2e-5 with --method full.", minimum=1e-12, topic=TOPIC_RUN, key=RATE
    )
    schedule: str = option(
        "cosine", "How the learning rate goes on behind a warm-up of 3 %.", choices=tuple(SCHEDULES), topic=TOPIC_RUN
    )
    precision: str = option("bf16", "What is computed in.", choices=("bf16", "fp16", "fp32"), topic=TOPIC_RUN)
    seed: int = option(17, "Of the order of samples, and of what is kept apart.", topic=TOPIC_RUN)

    ask: int = option(
        12,
        "Held-out prompts that the model is asked before and after; the page of the run shows its answers.",
        minimum=0,
        maximum=200,
        topic=TOPIC_AFTER,
    )
    serve: bool = option(False, "Serve the model as it was and as it became once the run has ended.", topic=TOPIC_AFTER)
    port: int = option(
        8000, "Of that server, whose chats the page links to.", minimum=1, maximum=65535, topic=TOPIC_AFTER
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is not None and self.epochs <= 0:
            raise ConfigError("epochs=0 trains nothing: name a number above 0, such as 0.5")
        if self.epochs is not None and self.steps is not None:
            raise ConfigError("steps and epochs both say how long the run is: leave one of the two out")
        values = {name: getattr(self, name) for name in OF_ADAPTERS}
        spare = [name for name, value in values.items() if value != declared(FinetuneOptions)[name].default]
        if spare and self.method == "full":
            name = f"--{spare[0]}" if values[spare[0]] is True else f"{spare[0]}={values[spare[0]]}"
            raise ConfigError(f"{name} belongs to lora and dora: method=full trains all parameters as they are")

    def with_preset(self, explicit: Collection[str]) -> "FinetuneOptions":
        """With the preset's values for the options that a call does not name."""
        if self.preset is None:
            return self
        values = PRESETS[self.preset].values
        if self.method == "full" and not values.keys().isdisjoint(OF_ADAPTERS):
            raise ConfigError(f"preset={self.preset} is of an adapter, which method=full has none of: leave one out")
        changes = {name: value for name, value in values.items() if name not in explicit}
        if "epochs" in explicit:
            changes.pop("steps", None)
        return replace(self, **changes)  # type: ignore[arg-type]  # names and values of this class
