"""The keys of what watches a run: callbacks and loggers."""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from roofline.common import extensions
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.common.names import did_you_mean
from roofline.train.callback import Callback
from roofline.train.config.section import Duration, Section
from roofline.train.storage.store import checked_name


class EarlyStopperSection(Section):
    """Ends the run when what is monitored has had no new best value for more than `patience`.

    dataloader_label: of an evaluation ("eval", or its label, also as "eval/LABEL"), or "train". comp: whether less or
    more is better. min_delta: a gain that is not greater does not count.
    """

    monitor: Literal["LanguageCrossEntropy", "LanguagePerplexity"]
    dataloader_label: str
    comp: Literal["less", "greater"] = "less"
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    patience: Duration = "1ep"

    @property
    def label(self) -> str:
        """The label of the evaluation as its loader has it."""
        return self.dataloader_label.removeprefix("eval/")


class LossSpikeSection(Section):
    """Warns, or with log_only=false ends the run, where more than `patience` steps in a row have a loss of at least
    outlier_multiplier times the mean of the window_size steps before, or where half of those lie above loss_cap."""

    log_only: bool = True
    patience: Annotated[int, Field(ge=0)] = 4
    outlier_multiplier: Annotated[float, Field(gt=1)] = 2
    window_size: Annotated[int, Field(ge=1)] = 100
    loss_cap: Annotated[float, Field(gt=0)] | None = None


class WrittenSamplesSection(Section):
    """Texts that the model writes after each prompt, every `interval` and at the end of the run.

    batch_size: prompts that are computed at a time; default all. max_new_tokens: of each answer, which ends earlier
    with the tokenizer's end token. do_sample: draw each token, from the top_k likeliest (0: from all) that together
    have a probability of at least top_p, at `temperature`; False: take the likeliest.
    """

    prompts: Annotated[tuple[str, ...], Field(min_length=1)]
    interval: Duration
    batch_size: Annotated[int, Field(ge=1)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] = 20
    do_sample: bool = False
    temperature: Annotated[float, Field(gt=0)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _draws_only_if_asked_to(self) -> "WrittenSamplesSection":
        unread = [name for name in ("temperature", "top_k", "top_p") if getattr(self, name) is not None]
        if unread and not self.do_sample:
            raise ValueError(f"{', '.join(unread)}: read with do_sample: true alone")
        return self


class HfFoldersSection(Section):
    """Exports the weights as SAVE_FOLDER/huggingface/NAME every save_interval and at the end of the run.

    save_folder: a folder or the URL of an object store, in which {run_name} is filled in. huggingface_folder_name: the
    NAME, in which {batch} (steps done) and {run_name} are filled in. overwrite: replace folders that are there.
    """

    save_folder: str
    save_interval: Duration
    huggingface_folder_name: str = "ba{batch}"
    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    overwrite: bool = True

    @field_validator("huggingface_folder_name")
    @classmethod
    def _can_be_filled_in(cls, name: str) -> str:
        try:
            checked_name(name.format(batch=1, run_name="run"))
        except (LookupError, ValueError, ConfigError) as error:
            raise ValueError("it is the name of a folder, in which {batch} and {run_name} are filled in") from error
        return name


class CallbacksSection(Section):
    """What is always measured, with its options, what a run writes beside its log, and what may end it.

    speed_monitor: window_size: steps that displayed speeds average over; warmup: first steps that the card leaves out;
        gpu_flops_available: the device's peak in FLOP/s, instead of the known one.
    generate: another name of generate_callback.
    own: callbacks of other packages with their options. They are written beside the others, and read into this.
    """

    class Speed(Section):
        window_size: Annotated[int, Field(ge=1)] = 10
        warmup: Annotated[int, Field(ge=0)] = 2
        gpu_flops_available: Annotated[float, Field(gt=0)] | None = None

    class Nothing(Section):
        pass

    speed_monitor: Speed = Speed()
    lr_monitor: Nothing | None = None
    memory_monitor: Nothing | None = None
    runtime_estimator: Nothing | None = None
    early_stopper: EarlyStopperSection | None = None
    killlossspike: LossSpikeSection | None = None
    generate_callback: WrittenSamplesSection | None = None
    generate: WrittenSamplesSection | None = None
    hf_checkpointer: HfFoldersSection | None = None
    own: dict[str, JsonObject] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _of_other_packages(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        own = {**(values.get("own") or {}), **{k: v or {} for k, v in values.items() if k not in cls.model_fields}}
        if not own:
            return values
        extensions.load()
        callbacks = {name: value for name, value in values.items() if name not in _makers}
        return {**callbacks, "own": {name: options for name, options in own.items() if name not in callbacks}}

    @model_validator(mode="after")
    def _samples_once(self) -> "CallbacksSection":
        if self.generate is not None and self.generate_callback is not None:
            raise ValueError("generate and generate_callback are one: write one of them")
        return self

    @property
    def samples(self) -> WrittenSamplesSection | None:
        """The section of samples, by either of its names."""
        return self.generate_callback or self.generate

    @field_validator("own")
    @classmethod
    def _are_registered(cls, own: dict[str, JsonObject]) -> dict[str, JsonObject]:
        for name in own:
            own_callback(name)
        return own


_makers: dict[str, Callable[..., Callback]] = {}


def register(name: str, make: Callable[..., Callback]) -> None:
    """Add a callback, made from the options of its section. Raises ConfigError when the name is taken."""
    if name in CallbacksSection.model_fields or name in _makers:
        raise ConfigError(f"a callback named {name!r} is already registered")
    _makers[name] = make


def own_callback(name: str) -> Callable[..., Callback]:
    """What makes a callback of another package. Raises ValueError when there is none of that name."""
    if name not in _makers:
        raise ValueError(f"no installed package registers a callback named {name!r}{did_you_mean(name, _makers)}")
    return _makers[name]


class Logger(Section):
    """Options of one logger."""

    rank_zero_only: Literal[True] = True


class TensorboardLogger(Logger):
    """log_dir: default RUN_FOLDER/tensorboard; flush_interval: seconds between writes at the most."""

    log_dir: str | None = None
    flush_interval: Annotated[int, Field(ge=1)] = 120


class WandbLogger(Logger):
    """Options of wandb.init. name: default the run's; dir: default the run's folder; id: of a run to continue."""

    project: str | None = None
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    dir: str | None = None
    id: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None
    log_artifacts: Literal[False] = False


class MlflowLogger(Logger):
    """tracking_uri: default MLflow's own; experiment_name; run_name: default the run's; flush_interval: seconds."""

    tracking_uri: str | None = None
    experiment_name: str = "roofline"
    run_name: str | None = None
    tags: dict[str, str] = Field(default_factory=dict)
    flush_interval: Annotated[float, Field(ge=0)] = 10
    log_system_metrics: Literal[False] = False


class LoggersSection(Section):
    """Each logger that has a section gets every number of the log; null: it is not used."""

    tensorboard: TensorboardLogger | None = None
    wandb: WandbLogger | None = None
    mlflow: MlflowLogger | None = None
