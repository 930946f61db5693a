"""The keys of what a run reads: data sets, mixtures of them, and the loaders of training and evaluation."""

from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from roofline.train.config.section import Bytes, Section


def _positive(value: int | float | str) -> int | float | str:
    try:
        fits = Fraction(str(value)) > 0
    except (ValueError, ZeroDivisionError):
        fits = False
    if not fits:
        raise ValueError("it is no number above 0")
    return value


def _count(value: object) -> object:
    """A number of samples; "10k", "2m" and "1b" are thousands, millions and milliards of them."""
    units = {"k": 1000, "m": 1000**2, "b": 1000**3}
    if isinstance(value, str) and value[:-1].isdigit() and value[-1].lower() in units:
        return int(value[:-1]) * units[value[-1].lower()]
    return value


class HfKwargs(Section):
    """Where the files of hf_name are."""

    data_files: str | list[str] | dict[str, str | list[str]] | None = None
    data_dir: str | None = None


class StreamSection(Section):
    """One data set: a folder (local), or a URL (remote) with a folder as its cache (local).

    Its part of each batch is proportional to `proportion`, or to the samples that it gives to an epoch: `repeat` times
    its own, or `choose`. All streams of a mixture use proportion, or none does.
    """

    local: str | None = None
    remote: str | None = None
    split: str | None = None
    proportion: Annotated[int | float | str, AfterValidator(_positive)] | None = None
    repeat: Annotated[int | float | str, AfterValidator(_positive)] | None = None
    choose: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_share(self) -> "StreamSection":
        if sum(share is not None for share in self.shares) > 1:
            raise ValueError("proportion, repeat and choose exclude each other")
        return self

    @property
    def shares(self) -> tuple[int | float | str | None, ...]:
        """What says how much of a mixture it is."""
        return self.proportion, self.repeat, self.choose


class SamplesSection(StreamSection):
    """Samples that are prepared when the run begins, in the run's folder; of loaders with the name finetuning alone.

    hf_name: a file or folder with samples, or json, csv, parquet, arrow or text with the files in hf_kwargs: data_files
        (a path, a list, or one of these for each split) or data_dir. split: which of their files.
    preprocessing_fn: MODULE:FUNCTION, which makes another mapping of each record, such as one of prompt and response.
    format: the form of the records, as `roofline finetune --format` has it; default: told from their keys.
    packing_ratio: above 1, or auto: samples are packed into rows, as tightly as they fit; else each has a row.
    allow_pad_trimming: do not compute the padding behind the longest row of a microbatch.
    target_prompts, target_responses: what is trained on beside the (last) answers.
    """

    hf_name: str | None = None
    hf_kwargs: HfKwargs = HfKwargs()
    preprocessing_fn: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    format: str | None = None
    packing_ratio: Annotated[float, Field(ge=1)] | Literal["auto"] = 1.0
    allow_pad_trimming: bool = True
    decoder_only_format: Literal[True] = True
    target_prompts: Literal["none", "all"] = "none"
    target_responses: Literal["all", "last"] = "last"

    @property
    def of_samples(self) -> list[str]:
        """The keys that are read for samples alone, as far as they say anything."""
        fields = {name: SamplesSection.model_fields[name] for name in SamplesSection.__annotations__}
        return [name for name, field in fields.items() if getattr(self, name) != field.default]

    @model_validator(mode="after")
    def _one_source(self) -> "SamplesSection":
        if self.hf_name is not None and (self.local or self.remote):
            raise ValueError("hf_name is prepared when the run begins, local and remote are shards: name one of them")
        return self


class DatasetSection(SamplesSection):
    """A data set, or several under `streams`. shuffle_seed: default the run's seed; cache_limit: bytes or "20gb".

    shuffle_algo: py1b shuffles groups of whole shards with at least shuffle_block_size samples, py1s each shard, naive
        all samples; the shards are in random order, too. epoch_size: samples that an epoch (1ep) counts.
    """

    streams: dict[str, StreamSection] = Field(default_factory=dict)
    shuffle: bool = False
    shuffle_algo: Literal["py1b", "py1s", "naive"] = "py1b"
    shuffle_seed: int | None = None
    shuffle_block_size: int | None = None
    epoch_size: Annotated[int, BeforeValidator(_count), Field(ge=1)] | None = None
    batching_method: Literal["stratified"] = "stratified"
    sampling_method: Literal["balanced"] = "balanced"
    max_seq_len: int | None = None
    eos_token_id: int | None = None
    cache_limit: Bytes | None = None
    predownload: int | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "DatasetSection":
        if self.shuffle_algo != "py1b" and self.shuffle_block_size is not None:
            raise ValueError(f"shuffle_block_size belongs to shuffle_algo=py1b, not to {self.shuffle_algo}")
        # The files that earlier versions wrote into runs' folders have a proportion of 1 everywhere.
        if self.streams and (self.proportion not in (None, 1) or self.repeat or self.choose):
            raise ValueError("proportion, repeat and choose belong to each of the streams")
        proportions = [stream.proportion is not None for stream in self.streams.values()]
        if any(proportions) and not all(proportions):
            raise ValueError("all streams have a proportion, or none has")
        return self


class LoaderSection(Section):
    """name: "finetuning" reads rows of samples with answers to learn (`local`: shards that `roofline finetune` wrote;
    hf_name: samples that are prepared at the start); "synthetic" stands for random ids instead of a data set.
    num_workers: threads that read ahead."""

    name: Literal["text", "finetuning", "synthetic"] = "text"
    dataset: DatasetSection = DatasetSection()
    drop_last: bool = True
    num_workers: Annotated[int, Field(ge=0)] = 1
    pin_memory: bool = True
    persistent_workers: bool = True
    prefetch_factor: Annotated[int, Field(ge=1)] = 2
    timeout: float = 0

    @model_validator(mode="after")
    def _samples_are_finetuning(self) -> "LoaderSection":
        if self.name != "finetuning" and self.dataset.of_samples:
            raise ValueError(f"dataset.{self.dataset.of_samples[0]} belongs to a loader whose name is finetuning")
        return self


class EvalLoaderSection(LoaderSection):
    """label: the name of its evaluations in the log, the card and for callbacks; several loaders have one each."""

    label: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None

    @model_validator(mode="after")
    def _each_row_once(self) -> "EvalLoaderSection":
        sets = (self.dataset, *self.dataset.streams.values())
        if self.dataset.epoch_size or any(stream.repeat or stream.choose for stream in sets):
            raise ValueError("each row is evaluated once, without epoch_size, repeat and choose")
        return self


# The tags keep the faults of one form from being joined by those of the other.
EvalLoaders = Annotated[
    Annotated[EvalLoaderSection, Tag("one")] | Annotated[tuple[EvalLoaderSection, ...], Tag("several")],
    Discriminator(lambda value: "several" if isinstance(value, list | tuple) else "one"),
]
