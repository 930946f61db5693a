"""Loaders of samples in a run's configuration: prepared in the run's folder before it begins, then read as shards."""

import glob
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

from roofline.bundle import load_text_of
from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.units import counted
from roofline.train.config.data_sets import DatasetSection, LoaderSection, SamplesSection
from roofline.train.config.schema import TrainConfig
from roofline.train.data.record_fields import unused_words
from roofline.train.data.record_files import READERS
from roofline.train.finetune.prepare import TRAIN, Data, Prepared, Preprocess, prepare
from roofline.train.run_folder import folder_of

FOLDER = "samples"  # of the prepared shards, in the run's
_KINDS = {"json": (".json", ".jsonl"), "csv": (".csv",), "parquet": (".parquet",), "arrow": (".arrow",)}
_KINDS["text"] = (".txt",)


def of_samples(config: TrainConfig) -> Iterator[tuple[str, LoaderSection]]:
    """(name of its folder, loader) of each loader whose samples are prepared when the run begins."""
    if config.train_loader.dataset.hf_name is not None:
        yield TRAIN, config.train_loader
    for label, loader in config.evaluations.items():
        if loader.dataset.hf_name is not None:
            yield _of_evaluation(label), loader


def _of_evaluation(label: str) -> str:
    """The folder of an evaluation's samples: no label has a plus sign, so it is no other's."""
    return f"{label}+eval" if label == TRAIN else label


def prepare_all(config: TrainConfig) -> None:
    """Prepare the samples of all loaders, unless they are there; a warning names what of them is not used. Raises
    ConfigError, UnsupportedError."""
    for name, loader in of_samples(config):
        assert config.tokenizer is not None, "a conflict of the configuration otherwise"
        words, template = load_text_of(config.tokenizer.name)
        folder = folder_of(config) / FOLDER / name
        is_new = not folder.exists()
        done = prepare(data_of(loader, config.max_seq_len), folder, words, template)
        for note in _notes(done) if is_new else ():
            log.get("train").warning("%s: %s", loader.dataset.hf_name, note)


def _notes(done: Prepared) -> Iterator[str]:
    """What of the samples is not trained on, in words."""
    if done.unused:
        yield f"not used: {unused_words(done.unused)}"
    if done.skipped:
        yield f"files that were not read, by their suffix: {counted(len(done.skipped), 'file')}"
    if done.cut:
        yield f"{counted(done.cut, 'sample')} longer than {done.length:,} tokens: cut at the end"
    if done.left_out:
        yield f"{counted(done.left_out, 'sample')} without a target within {done.length:,} tokens: left out"
    if done.empty:
        yield f"{counted(done.empty, 'answer')} without a text: the token that ends it alone is trained on"
    if done.unprompted:
        yield f"{counted(done.unprompted, 'answer')} with no prompt before: the first token is not trained on"
    if done.greeted:
        yield f"{counted(done.greeted, 'chat')} beginning with the assistant: that message is not trained on"


def prepared(config: TrainConfig) -> TrainConfig:
    """The configuration with the shards of `prepare_all` in place of samples."""
    if not any(of_samples(config)):
        return config
    folder = folder_of(config) / FOLDER

    def local(name: str, loader: LoaderSection) -> LoaderSection:
        if loader.dataset.hf_name is None:
            return loader
        unread = {*SamplesSection.__annotations__, "split"} - {"allow_pad_trimming"}
        values = loader.dataset.model_dump(exclude=unread, exclude_unset=True) | {"local": str(folder / name / TRAIN)}
        return loader.model_copy(update={"dataset": DatasetSection.model_validate(values)})

    evaluations = {label: local(_of_evaluation(label), loader) for label, loader in config.evaluations.items()}
    several = isinstance(config.eval_loader, tuple)
    held_out = tuple(evaluations.values()) if several else next(iter(evaluations.values()), None)
    return config.model_copy(update={"train_loader": local(TRAIN, config.train_loader), "eval_loader": held_out})


def data_of(loader: LoaderSection, length: int) -> Data:
    """What is prepared for a loader. Raises ConfigError."""
    section = loader.dataset
    places, split = _places(section)
    packs = section.packing_ratio == "auto" or section.packing_ratio > 1
    return Data(
        places,
        length,
        split,
        form=section.format,
        pack=packs,
        preprocess=_function(section.preprocessing_fn) if section.preprocessing_fn else None,
        prompts=section.target_prompts == "all",
        last_only=section.target_responses == "last",
    )


def _places(section: DatasetSection) -> tuple[tuple[Path, ...], str | None]:
    """The files and folders of hf_name, and the split that is still to be picked of them."""
    name, kwargs = str(section.hf_name), section.hf_kwargs
    files = kwargs.data_files
    if Path(name).exists():
        if files is not None or kwargs.data_dir is not None:
            raise ConfigError(f"dataset.hf_name={name} is a place itself: leave hf_kwargs out")
        return (Path(name),), section.split
    if name not in _KINDS:
        raise ConfigError(
            f"dataset.hf_name={name}: there is no such file or folder, and nothing is fetched from the hub: fetch it "
            f"(hf download --repo-type dataset {name} --local-dir FOLDER) and name FOLDER"
        )
    if kwargs.data_dir is not None:
        return (Path(kwargs.data_dir),), section.split
    if isinstance(files, dict):
        split = section.split or TRAIN
        if split not in files:
            raise ConfigError(f"dataset.hf_kwargs.data_files has no split {split!r}: it has {', '.join(files)}")
        files = files[split]
    patterns = [files] if isinstance(files, str) else files or []
    paths = [Path(path) for pattern in patterns for path in (sorted(glob.glob(pattern)) or [pattern])]
    if not paths:
        raise ConfigError(f"dataset.hf_name={name} needs the files in hf_kwargs: data_files or data_dir")
    wrong = next((path for path in paths if path.suffix not in (*_KINDS[name], *READERS)), None)
    if wrong is not None:
        raise ConfigError(f"{wrong}: data is read from {', '.join(READERS)} files")
    return tuple(paths), None


def _function(name: str) -> Preprocess:
    """The function that MODULE:FUNCTION names, with a text that tells it from others."""
    module, _, attribute = name.partition(":")
    try:
        function: Callable[..., object] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"dataset.preprocessing_fn={name} cannot be imported: {error}") from error
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        source = name
    return Preprocess(name, source, function)
