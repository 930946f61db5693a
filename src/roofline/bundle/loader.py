"""load(source): a model by name or path becomes something that runs, with its tokenizer and chat template."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.backends import table
from roofline.backends.backend import CompilesAhead, LoadRequest, Neighbours, Notes, RunsBundles
from roofline.backends.options import LoadOptions
from roofline.bundle.manifest import WEIGHTS
from roofline.bundle.reader import Bundle, is_bundle
from roofline.bundle.recommended import recommended_sampling, warn_of_unused
from roofline.bundle.sources import Progress, open_checkpoint, open_source
from roofline.bundle.text_side import load_text, text_of_folder
from roofline.bundle.weights_checks import check_weights
from roofline.common import log
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.extras import named_packages
from roofline.common.json_types import JsonMapping
from roofline.weights.facts import ModelFacts, facts_of
from roofline.weights.parts_beside import PartsBeside

if TYPE_CHECKING:
    import numpy as np

    from roofline.backends.backend import Backend, CompiledAhead
    from roofline.backends.base import Executable
    from roofline.models.config import ModelConfig
    from roofline.ops.adapters import AdapterMatrix
    from roofline.ops.batch import BatchLimits
    from roofline.text.templates.template import ChatTemplate
    from roofline.text.tokenizers.tokenizer import Tokenizer
    from roofline.weights.checkpoint import Checkpoint
    from roofline.weights.vectors import VectorKind

    TextSide = tuple[Tokenizer, ChatTemplate] | tuple[None, None]
    Loaded = tuple[TextSide, Executable, Notes]


@dataclass
class LoadedModel:
    """A model ready to run.

    settings: the fields of `config`; executable: see backends.base; tokenizer, chat_template: None when loaded with
    text=False; notes: what was chosen automatically, and why; load_seconds: from call to ready; sampling: fields of
    SamplingParams that the model's files recommend; pooling: what a text's vector is made of where nobody says; facts:
    what lists of models show; other_parts: what a model that reads more than text has beside its text part.
    """

    name: str
    path: Path
    settings: JsonMapping
    executable: "Executable"
    tokenizer: "Tokenizer | None"
    chat_template: "ChatTemplate | None"
    notes: Notes
    load_seconds: float
    sampling: JsonMapping = field(default_factory=dict)
    pooling: "VectorKind" = "last"
    facts: ModelFacts | None = None
    other_parts: PartsBeside | None = None

    @property
    def media_ids(self) -> Mapping[int, str]:
        """Ids that stand for pictures and sound, which prompts may not have -> what the configuration calls them."""
        return self.other_parts.media if self.other_parts is not None else {}

    @cached_property
    def config(self) -> "ModelConfig":
        """The canonical configuration."""
        from roofline.models.registry import config_of

        return config_of(self.settings)


@named_packages()
def load(
    source: "str | Checkpoint" = "smollm2-135m",
    options: LoadOptions | None = None,
    *,
    text: bool = True,
    replica: Sequence[int] = (0, 1),
    draft: str | None = None,
    traces: "BatchLimits | None" = None,
    progress: Progress | None = None,
    **keywords: object,
) -> LoadedModel:
    """Load a model by catalogue name, ``hf:ORG/REPO``, or path: of weights, or of a bundle. ``preset:NAME`` is a shape
    of `models.presets`, for random weights. A Checkpoint is taken as it is: it has no text side to load.

    Weights are compiled into a cached bundle first, unless ROOFLINE_BUNDLES is off.

    Args:
        options, keywords: how to load it; keywords are fields of LoadOptions (docs/options.md).
        text: load tokenizer and chat template too.
        replica: (i, n), where n processes load the model beside each other: this one takes the i-th of the devices, or
            of the groups of them that its ranks need, and an n-th of the memory that caches may have.
        draft: a model that is loaded next on the same GPU, with as many tokens in its cache (see `load_with_draft`).
        traces: on a GPU, room is left for two other traces of this model, with steps and pages of these limits.
        progress: given, a model that is not here yet is pulled, and this is told how far (see weights.sources.pull).

    Raises:
        ConfigError, UnsupportedError, CapacityError: with cause and remedy.
    """
    start = time.perf_counter()
    if keywords or options is None:
        options = LoadOptions.from_keywords({**(options.changes() if options else {}), **keywords}, "load")
    backend, neighbours = table.get(options.backend), Neighbours(replica[0], replica[1], traces=traces)
    options = backend.resolve(options, neighbours)
    _check_ranks(source, backend, options)
    path, model = open_source(source, options, progress, needs_text=text, warns=neighbours.replica == 0)
    if draft is not None:
        neighbours = replace(neighbours, draft=open_checkpoint(draft, LoadOptions(backend=options.backend)))
    settings, sampling, pooling = _recommendations(model)
    if isinstance(model, Bundle):
        words, executable, notes = _load_bundle(model, backend, options, neighbours, text)
    else:
        words, executable, notes = _load_checkpoint(source, path, model, backend, options, neighbours, text)
    _tell_adapters(executable, options, path, model)
    name = (source if isinstance(source, str) else str(path)) + (f"+{options.weights}" if options.weights else "")
    seconds, notes_text = time.perf_counter() - start, "; ".join(f"{key}: {value}" for key, value in notes.items())
    log.get("bundle").info("%s ready in %.2f s: %s", name, seconds, notes_text)
    return LoadedModel(
        name=name,
        path=path,
        settings=settings,
        executable=executable,
        tokenizer=words[0],
        chat_template=words[1],
        notes=notes,
        load_seconds=seconds,
        sampling=sampling,
        pooling=pooling,
        facts=_facts(model),
        other_parts=_other_parts(path, model),
    )


def _check_ranks(source: "str | Checkpoint", backend: "Backend", options: LoadOptions) -> None:
    """Raise UnsupportedError where the backend has no ranks, or where other processes cannot read the source."""
    if options.ranks == 1:
        return
    from roofline.bundle.ranks import require_ranks

    require_ranks(backend, options)
    if not isinstance(source, str):
        what, reason = "a checkpoint in memory on several ranks", "other processes cannot read it"
        raise UnsupportedError(what, reason, ("a path",))


def _recommendations(model: "Bundle | Checkpoint") -> "tuple[JsonMapping, JsonMapping, VectorKind]":
    """Return the canonical configuration of a model, the sampling that its files recommend, and its kind of vectors."""
    if isinstance(model, Bundle):
        generation = model.manifest.generation
        return model.manifest.config, generation.get("sampling", {}), generation.get("pooling", "last")
    from roofline.weights.vectors import recommended_kind

    return model.config, recommended_sampling(model), recommended_kind(model)


def _other_parts(path: Path, model: "Bundle | Checkpoint") -> PartsBeside | None:
    """What a model has beside its text part, which is told in the log."""
    if isinstance(model, Bundle):
        values = model.manifest.generation.get("other_parts")
        parts = PartsBeside.of(values) if values is not None else None
    else:
        parts = model.other_parts
    if parts is not None:
        log.get("bundle").warning("%s: %s", path, parts)
    return parts


def _facts(model: "Bundle | Checkpoint") -> ModelFacts:
    if isinstance(model, Bundle):
        manifest = model.manifest
        nbytes = int(manifest.files[WEIGHTS]["bytes"])
        return facts_of(manifest.tensor_infos, nbytes, manifest.config["family"], manifest.source["kind"])
    nbytes = sum(tensor.nbytes for tensor in model.tensors.values())
    return facts_of(model.tensors, nbytes, model.config["family"], model.kind)


def _load_bundle(
    bundle: Bundle, backend: "Backend", options: LoadOptions, neighbours: Neighbours, text: bool
) -> "Loaded":
    assert isinstance(backend, RunsBundles), "open_source gives bundles to no other backend"
    mapping = bundle.map()  # read by a thread of its own during all that follows
    capacity = backend.capacity(options, bundle.manifest.config, neighbours.replicas)
    words: TextSide = bundle.text() if text else (None, None)
    with _completing(words[0]):
        executable, notes = backend.make_from_bundle(bundle, mapping, options, capacity)
    check_weights(bundle, executable, options.check_weights)
    return words, executable, notes


def _load_checkpoint(
    source: "str | Checkpoint",
    path: Path,
    checkpoint: "Checkpoint",
    backend: "Backend",
    options: LoadOptions,
    neighbours: Neighbours,
    text: bool,
) -> "Loaded":
    from roofline.models.registry import config_of

    warn_of_unused(checkpoint)
    settings = checkpoint.config
    capacity = backend.capacity(options, settings, neighbours.replicas)
    words: TextSide = (None, None)
    if text:  # before what takes longer: it may be refused
        has_files = isinstance(source, str) and checkpoint.kind == "random"
        words = _text_beside(path, checkpoint) if has_files else load_text(checkpoint)
    request = LoadRequest(checkpoint, config_of(settings), options, capacity, neighbours)
    if request.config.encoder and options.ranks > 1:
        reason = "several ranks give no hidden states, which are all that it has"
        raise UnsupportedError("an encoder model on several ranks", reason, ("tensor_parallel=1", "data_parallel"))
    if options.ranks == 1:
        executable, notes = backend.make(request)
    else:
        from roofline.bundle.ranks import start_ranks

        executable, notes = start_ranks(str(source), request)
    return words, executable, notes


def _tell_adapters(executable: "Executable", options: LoadOptions, path: Path, model: "Bundle | Checkpoint") -> None:
    """Tell places for adapters what they need of the model: its configuration, and for DoRA its files, whose rows have
    lengths; they are opened when the first such adapter is, and a bundle alone has none."""
    from roofline.backends.base import Adapts

    if not options.max_adapters or not isinstance(executable, Adapts):
        return
    config = model.manifest.config if isinstance(model, Bundle) else model.config

    def matrices_of(matrices: "Sequence[AdapterMatrix]") -> "Iterator[AdapterMatrix]":
        from roofline.weights.adapter_matrices import of_model

        return of_model(matrices, dict(config))

    executable.adapters.of_model = matrices_of
    if isinstance(model, Bundle) and is_bundle(path):
        return

    def scaling(matrix: "AdapterMatrix") -> "tuple[np.ndarray, np.ndarray]":
        from roofline.weights.adapter_merge import row_scaling

        return row_scaling(checkpoint(), matrix)

    @cache
    def checkpoint() -> "Checkpoint":
        from roofline.weights.checkpoint import open_checkpoint

        return open_checkpoint(path) if isinstance(model, Bundle) else model

    executable.adapters.row_scaling = scaling


@contextmanager
def _completing(tokenizer: "Tokenizer | None") -> Iterator[None]:
    """The tokenizer's tables are built by another thread meanwhile, where the first prompt is sure to need them."""
    if tokenizer is None or tokenizer.has_short_text_encoder:
        yield
        return
    from concurrent.futures import ThreadPoolExecutor  # 10 ms to import

    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(tokenizer.complete)
        yield
        built.result()


def load_text_of(source: str, backend: str = "cpu") -> "tuple[Tokenizer, ChatTemplate]":
    """The tokenizer and chat template of a model by name or path, from its bundle where its backend has one.

    A folder may hold the tokenizer alone.
    """
    if _has_text_alone(Path(source)):
        return text_of_folder(Path(source))
    # What is not kept matters to who loads the weights, which beside a server are other processes.
    _, model = open_source(source, LoadOptions(backend=backend), needs_text=True, warns=False)
    return model.text() if isinstance(model, Bundle) else load_text(model)


def _has_text_alone(folder: Path) -> bool:
    """Whether the text of a model is read from a folder without a look at weights, which need not be there."""
    has_tokenizer, has_configuration = (os.path.isfile(folder / name) for name in ("tokenizer.json", "config.json"))
    if not (has_tokenizer or has_configuration) or any(folder.glob("*.safetensors")):
        return False
    return has_tokenizer or not any(any(folder.glob(pattern)) for pattern in ("*.gguf", "*.bin", "*.pt*"))


def _text_beside(path: Path, checkpoint: "Checkpoint") -> "tuple[Tokenizer, ChatTemplate]":
    """The text of the files whose configuration has random weights: those of a file or a folder, none of a preset."""
    from roofline.weights import checkpoint as files

    if str(path).startswith("preset:"):
        raise ConfigError(f"{path} is a shape without a tokenizer: for texts, name a folder that has one")
    folder = path.parent if path.suffix == ".json" else path
    tokenizer, template = text_of_folder(folder) if _has_text_alone(folder) else load_text(files.open_checkpoint(path))
    tokenizer.limit_ends(checkpoint.config["vocab"])
    return tokenizer, template


def compile_ahead(
    source: str, options: LoadOptions, chips: Sequence[str], folder: Path | None = None
) -> "Iterator[CompiledAhead]":
    """Compile the kernels that a model runs on chips of these names, which need not be here.

    folder: default the kernel cache. Raises UnsupportedError where the backend cannot, else as `load`.
    """
    backend = table.get(options.backend)
    if not isinstance(backend, CompilesAhead):
        reason = "it has no kernels to compile before a model is loaded"
        raise UnsupportedError(f"compiling ahead for backend {options.backend!r}", reason, ("backend=gpu",))
    yield from backend.compile_ahead(partial(open_checkpoint, source, options), options, chips, folder)
