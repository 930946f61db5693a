"""What must hold before a run begins: the model's shape, the tokenizer, and the places that the run reads from."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from roofline.bundle import load_text_of
from roofline.common import log
from roofline.common.errors import RooflineError
from roofline.train.checkpoint import manifest
from roofline.train.config.data_sets import LoaderSection
from roofline.train.config.faults import Fault, error_of, names_key
from roofline.train.config.schema import TokenizerSection, TrainConfig
from roofline.train.data.mds import Shards
from roofline.train.data.mds_index import INDEX
from roofline.train.data.record_fields import unused_words
from roofline.train.model.shapes import model_config
from roofline.train.report import loggers

_log = log.get("train")


def check(config: TrainConfig) -> None:
    """Raise an error that names every fault; warn of what cannot be checked here."""
    faults_here = list(faults(config))
    if faults_here:
        raise error_of(faults_here, lambda fault: "")
    name = config.tokenizer.name if config.tokenizer is not None else ""
    if _is_repository(name):
        _log.warning("tokenizer.name=%s is not here: whether its ids fit the model's vocabulary is not checked", name)
    for loader in (config.train_loader, *config.evaluations.values()):
        for folder in _folders(loader):
            if unused := _unused_columns(folder, loader.name == "finetuning", config.grpo is not None):
                _log.warning("%s: not used: %s", folder, unused_words(unused, "row"))


def _folders(loader: LoaderSection) -> Iterator[Path]:
    """The local folders of shards that a loader reads."""
    section = loader.dataset
    if loader.name != "synthetic" and section.hf_name is None:
        for stream in section.streams.values() or (section,):
            if stream.remote is None and stream.local is not None:
                yield Path(stream.local, stream.split or section.split or "")


def _unused_columns(folder: Path, is_tuned: bool, is_rewarded: bool) -> dict[str, int]:
    """Columns of shards that no run reads so, and how many rows have them; none where the index cannot be read."""
    used = {"tokens", "documents"} | ({"trained"} if is_tuned else set()) | ({"record"} if is_rewarded else set())
    try:
        with closing(Shards(folder)) as shards:
            names = (name for shard in shards.shards[:1] for name, _, _ in shard.columns)
            return {name: len(shards) for name in names if name not in used}
    except RooflineError:
        return {}  # it is refused where it is read


def faults(config: TrainConfig) -> Iterator[Fault]:
    """Each fault of a configuration whose values are right by themselves."""
    vocab: int | None = None
    try:
        vocab = model_config(config.model, config.max_seq_len)["vocab"]
    except RooflineError as error:
        yield Fault("model", str(error) if names_key(str(error), "model") else f"model: {error}")
    if config.tokenizer is not None:
        yield from _tokenizer(config.tokenizer, None if config.model.loads_weights else vocab)
    yield from _data("train_loader", config.train_loader)
    several = isinstance(config.eval_loader, tuple)
    for number, loader in enumerate(config.evaluations.values()):
        yield from _data(f"eval_loader.{number}" if several else "eval_loader", loader)
    for absent in loggers.missing(config.loggers):
        yield Fault(absent.what, str(absent))
    if config.load_path is not None and not config.autoresume and "://" not in config.load_path:
        store, step = manifest.open_place(config.load_path)
        complete = manifest.steps(store)
        if not complete:
            yield Fault("load_path", f"load_path: {store.url} holds no complete checkpoint")
        elif step is not None and step not in complete:
            yield Fault("load_path", f"load_path: {store.url} has no complete checkpoint of step {step}")


def _tokenizer(section: TokenizerSection, vocab: int | None) -> Iterator[Fault]:
    """vocab: of a model that is made for the run, if it is known; others may lack rows for ids that no text has."""
    if _is_repository(section.name):
        return
    stem = f"tokenizer.name = {section.name}"
    try:
        ids = load_text_of(section.name)[0].vocab_size
    except RooflineError as error:
        yield Fault("tokenizer.name", f"{stem}: {error}")
        return
    if vocab is not None and ids > vocab:
        text = (
            f"{stem}: its {ids:,} ids are more than the model's vocabulary of {vocab:,}: train a model with that many"
        )
        yield Fault("tokenizer.name", text)


def _is_repository(name: str) -> bool:
    """Whether it names a repository of Hugging Face, as LLM Foundry's files do, and no folder here."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~", "hf:")) and not Path(name).exists()


def _data(key: str, loader: LoaderSection) -> Iterator[Fault]:
    """Data sets in folders; those in object stores are not looked for."""
    if loader.name == "synthetic" or loader.dataset.hf_name is not None:
        return  # samples are looked for when they are prepared
    of_loader = loader.dataset
    streams = {f"{key}.dataset.streams.{name}": stream for name, stream in of_loader.streams.items()}
    for stem, stream in (streams or {f"{key}.dataset": of_loader}).items():
        if stream.remote is not None:
            continue
        if stream.local is None:
            text = f"{stem}: local is missing, the folder of shards, or remote, their URL"
            yield Fault(stem, text)
            continue
        split = stream.split or of_loader.split
        folder = Path(stream.local, split or "")
        if not (folder / INDEX).is_file():
            what = (
                f"{folder} is no folder of shards: {INDEX} is missing" if folder.is_dir() else "there is no such folder"
            )
            suffix = f" with split = {split}" if split else ""
            yield Fault(stem, f"{stem}.local = {stream.local}{suffix}: {what}")
