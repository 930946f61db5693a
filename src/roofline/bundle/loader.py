"""load(source): a model by name or path becomes something that runs, with its tokenizer and chat template."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from roofline.bundle import bundle_cache as cached
from roofline.bundle.cache_size import cache_size, max_context, resolve_kv_dtype, step_size
from roofline.bundle.makers import Asked, by_reference, of_bundle, on_cpu, on_gpu, weights_hash
from roofline.bundle.reader import is_bundle, open_bundle
from roofline.bundle.text_side import load_text, text_of_folder
from roofline.common import extensions, log
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.ops.batch import PAGE_TOKENS, BatchLimits

if TYPE_CHECKING:
    from roofline.backends.base import Executable
    from roofline.backends.parallel.ranks import Grid
    from roofline.bundle.reader import Bundle
    from roofline.bundle.writer import Written
    from roofline.models.config import ModelConfig
    from roofline.text.templates.template import ChatTemplate
    from roofline.text.tokenizers.tokenizer import Tokenizer
    from roofline.weights.checkpoint import Checkpoint

MOST_DRAFTED = 64  # logit rows for drafted tokens: with more sequences than these serve, a step is busy without drafts
BACKENDS = ("cpu", "gpu", "reference")
ACTIVATIONS = ("auto", "fp8")
ARITHMETICS = ("cpu", "plain")  # that the reference computes in: another backend's, or float32 throughout
Progress = Callable[[str, int, int | None], None]  # see weights.sources.pull


@dataclass
class LoadedModel:
    """A model ready to run.

    settings: the fields of `config`; executable: see backends.base; tokenizer, chat_template: None when loaded with
    text=False; notes: what was chosen automatically, and why; load_seconds: from call to ready.
    """

    name: str
    path: Path
    settings: Mapping[str, Any]
    executable: "Executable"
    tokenizer: "Tokenizer | None"
    chat_template: "ChatTemplate | None"
    notes: Mapping[str, str]
    load_seconds: float

    @cached_property
    def config(self) -> "ModelConfig":
        """The canonical configuration."""
        from roofline.models.config import ModelConfig

        return ModelConfig.of(self.settings)


def load(
    source: "str | Checkpoint" = "smollm2-135m",
    *,
    backend: str = "cpu",
    device: str = "auto",
    exact: bool = False,
    activations: str = "auto",
    graphs: bool = True,
    offload: "int | Literal['auto']" = 0,
    threads: int | None = None,
    isa: str | None = None,
    cache_tokens: int | None = None,
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
    max_batch_tokens: int | None = None,
    max_running: int | None = None,
    draft_tokens: int = 0,
    weights: str | None = None,
    text: bool = True,
    verify: bool = True,
    tuned: bool = True,
    arithmetic: str = "cpu",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    replica: Sequence[int] = (0, 1),
    draft: str | None = None,
    traces: BatchLimits | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model by catalogue name, ``hf:ORG/REPO``, or path: of weights, or of a bundle. ``preset:NAME`` is a shape
    of `models.presets`, for random weights. A Checkpoint is taken as it is: it has no text side to load.

    Weights are compiled into a cached bundle first, unless ROOFLINE_BUNDLES is off.

    Args:
        backend: "cpu", "gpu", or "reference" (torch, slow).
        device: of the gpu backend: "amd:0", "nvidia:1", a product's or an architecture's name (see `roofline doctor`);
            "auto" is the first that torch can use.
        exact: on a GPU, no sum whose order depends on what else is in a step; elsewhere that is so anyway.
        activations: "fp8", of a checkpoint in fp8 on a GPU that has it: what is multiplied with its weights is rounded
            to the same, a scale for each row; "auto": the weights are widened instead, exactly.
        graphs: on a GPU, decode steps are captured and replayed; off to measure what that brings.
        offload: layers whose weights stay in the host's memory and are copied to the GPU in each step; "auto": as few
            as it takes for the rest to fit.
        cache_tokens: tokens the KV cache holds; default 16,384, or what a quarter of the free memory holds if less.
        kv_cache_dtype: "auto" is "bf16", on a GPU the model's 16 bits. Half the bytes: "int8", with a scale for each
            token and head, not on a GPU; "fp8" (e4m3, no scales), on GPUs that have it.
        max_model_len: positions served; default the model's own, cut to the cache.
        max_batch_tokens, max_running: the largest step: query tokens and sequences. None: 512 and 64, on a GPU 2,048
            and 256: it is busy with more, and reads its weights as often as there are steps.
        draft_tokens: longest draft of a sequence that a step verifies (see engine.speculation).
        weights: "random:SEED" runs the model's configuration on random weights, "random:SEED:FORMAT" in that format; a
            folder with a config.json is enough then.
        text: load tokenizer and chat template too.
        verify: on a CPU, check the chosen kernels against the reference on the file's own bytes.
        tuned: on a CPU, use the kernel variants that `roofline tune` found for this model on this machine.
        arithmetic: what the reference computes in: "cpu", with the cpu's own roundings, or "plain", float32 throughout.
        tensor_parallel, pipeline_parallel: ranks that share each layer's matrices, and stages that share the layers: as
            many processes as their product, each with `threads`, or a device of those that `device` names. The cpu
            backend has no stages (see docs/how-to/parallel.md).
        replica: (i, n), where n processes load the model beside each other: this one takes the i-th of the devices, or
            of the groups of them that its ranks need, and an n-th of the memory that caches may have.
        draft: a model that is loaded next, on the same GPU: room is left for it and for as many tokens in its cache
            (see `load_with_draft`, which loads both).
        traces: on a GPU, room is left for two other traces of this model, with steps and pages of these limits.
        progress: given, a model that is not here yet is pulled, and this is told how far (see weights.sources.pull).

    Raises:
        ConfigError, UnsupportedError, CapacityError: with cause and remedy.
    """
    start = time.perf_counter()
    if backend not in BACKENDS:
        raise UnsupportedError(f"backend {backend!r}", "there is no such backend", BACKENDS)
    if backend != "gpu" and device != "auto":
        raise UnsupportedError(f"device={device!r} with backend {backend!r}", "it has no devices", ("backend=gpu",))
    if backend != "gpu" and offload != 0:
        raise UnsupportedError(f"offload={offload!r} with backend {backend!r}", "it has no devices", ("backend=gpu",))
    if activations not in ACTIVATIONS:
        raise ConfigError(f"activations={activations!r} is none of {', '.join(ACTIVATIONS)}")
    if backend != "gpu" and activations != "auto":
        reason = "only GPUs multiply 8-bit floats, and of them not all"
        raise UnsupportedError(f"activations={activations!r} with backend {backend!r}", reason, ("backend=gpu",))
    if offload != "auto" and not isinstance(offload, int):
        raise ConfigError(f"offload={offload!r} is neither a number of layers nor 'auto'")
    grid = _grid(tensor_parallel, pipeline_parallel, backend, source)
    if grid is not None and offload != 0:
        raise UnsupportedError("offload on several ranks", "what a rank copies holds up the others", ("offload=0",))
    number, replicas = replica
    if backend == "gpu" and replicas > 1:
        from roofline.backends.gpu.devices import group

        device = group(device, number, replicas, tensor_parallel * pipeline_parallel)
    kv_dtype = _cache_dtype(backend, kv_cache_dtype, arithmetic)
    path, bundle, checkpoint = open_source(source, backend, weights, progress, whole=grid is None)
    if bundle is not None:
        mapping = bundle.map()  # read by a thread of its own during all that follows
        settings = bundle.manifest.config
    else:
        assert checkpoint is not None, "without a bundle there is a checkpoint"
        settings = checkpoint.config
    if backend == "gpu":
        pages, longest = 0, max_context(settings["max_position"], max_model_len)
    else:
        pages, longest = cache_size(settings, cache_tokens, max_model_len, kv_dtype, replicas)
    max_batch_tokens, max_running = step_size(backend, max_batch_tokens, max_running)
    limits = BatchLimits(
        tokens=max(max_batch_tokens, max_running),
        segments=max_running,
        rows=max_running + min(max_running * draft_tokens, MOST_DRAFTED),
        pages=max_running * -(-longest // PAGE_TOKENS),
    )
    fixed = max_model_len is not None
    asked = Asked(
        kv_dtype, limits, pages, longest, fixed, cache_tokens, threads, isa, verify, tuned,
        arithmetic, device, exact, graphs, offload, draft, traces, activations,
    )  # fmt: skip
    if bundle is not None:
        words: tuple[Tokenizer | None, ChatTemplate | None] = bundle.text() if text else (None, None)
        with _completing(words[0]):
            executable, notes = of_bundle(bundle, mapping, asked)
    else:
        from concurrent.futures import ThreadPoolExecutor

        from roofline.models.config import ModelConfig

        assert checkpoint is not None, "without a bundle there is a checkpoint"
        with ThreadPoolExecutor(1) as beside:
            reading = beside.submit(load_text, checkpoint) if text else None
            config = ModelConfig.of(settings)
            if grid is None:
                make = {"cpu": on_cpu, "gpu": on_gpu, "reference": by_reference}[backend]
                executable, notes = make(asked, checkpoint, config)
            else:
                from roofline.bundle.parallel import load_rank_0

                executable, notes = load_rank_0(grid, str(source), weights, backend, asked, checkpoint, config)
            words = reading.result() if reading is not None else (None, None)
    called = source if isinstance(source, str) else str(path)
    name = called if weights is None else f"{called}+{weights}"
    seconds = time.perf_counter() - start
    log.get("bundle").info("%s ready in %.2f s: %s", name, seconds, "; ".join(f"{k}: {v}" for k, v in notes.items()))
    tokenizer, template = words
    return LoadedModel(name, path, settings, executable, tokenizer, template, notes, seconds)


def compile_model(source: str, out: Path, *, threads: int | None = None, progress: Progress | None = None) -> "Written":
    """Compile a model into a bundle at the directory `out`; a bundle that is there is replaced.

    Args:
        source: as for `load`.
        threads: for packing; default the usable cores.

    Raises:
        ConfigError: the source cannot be read, or `out` cannot be written or is something else.
        UnsupportedError, CapacityError: as `load`.
    """
    from roofline.weights import sources

    extensions.load()
    path = sources.resolve(source, fetch=progress is not None, progress=progress)
    if is_bundle(path):
        raise ConfigError(f"{path} is a bundle already; compile the model it was made from")
    return _compile(path, source, out, cached.key_of(path), threads)


def _compile(path: Path, name: str, out: Path, key: str, threads: int | None) -> "Written":
    from roofline.backends.cpu.select import choose_threads
    from roofline.bundle.writer import write_bundle
    from roofline.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)

    return write_bundle(
        checkpoint,
        out,
        name=name,
        source=path,
        key=key,
        text=load_text,
        weights_hash=weights_hash,
        threads=int(choose_threads(threads).value),
    )


def load_text_of(source: str, backend: str = "cpu") -> "tuple[Tokenizer, ChatTemplate]":
    """The tokenizer and chat template of a model by name or path, from its bundle where its backend has one.

    A folder may hold the tokenizer alone.
    """
    if (Path(source) / "tokenizer.json").is_file() and not any(Path(source).glob("*.safetensors")):
        return text_of_folder(Path(source))
    _, bundle, checkpoint = open_source(source, backend, None, None)
    if bundle is not None:
        return bundle.text()
    assert checkpoint is not None, "without a bundle there is a checkpoint"
    return load_text(checkpoint)


def _grid(tensor: int, pipeline: int, backend: str, source: "str | Checkpoint") -> "Grid | None":
    """The ranks, where there are several. Raises UnsupportedError on what they cannot run."""
    if (tensor, pipeline) == (1, 1):
        return None
    from roofline.backends.parallel.ranks import Grid

    grid = Grid(tensor, pipeline)
    if backend == "cpu" and pipeline > 1:
        what, reason = f"pipeline_parallel={pipeline} with backend 'cpu'", "it runs all layers on each rank"
        raise UnsupportedError(what, reason, ("tensor_parallel", "backend=gpu", "backend=reference"))
    if not isinstance(source, str):
        raise UnsupportedError("a checkpoint in memory on several ranks", "other processes cannot read it", ("a path",))
    return grid


def _cache_dtype(backend: str, asked: str, arithmetic: str) -> str:
    """The format of the KV cache. Raises ConfigError on an arithmetic that the backend, or the cache, does not have."""
    if arithmetic not in ARITHMETICS or (backend != "reference" and arithmetic != "cpu"):
        reason = "only the reference backend can be told what to compute in"
        raise UnsupportedError(f"arithmetic {arithmetic!r} with backend {backend!r}", reason, ARITHMETICS)
    if backend == "gpu":
        return asked  # the model's file decides: bundle/gpu.py
    if arithmetic != "plain":
        return resolve_kv_dtype(asked)
    if asked != "auto":
        raise UnsupportedError(f"kv_cache_dtype {asked!r} in plain arithmetic", "its cache is float32", ("auto",))
    return "f32"


def open_source(
    source: "str | Checkpoint", backend: str, weights: str | None, progress: Progress | None, whole: bool = True
) -> "tuple[Path, Bundle | None, Checkpoint | None]":
    """The source's path, and either its bundle or its checkpoint; whole: all of the model is wanted, not a rank's part,
    for which a bundle has no room."""
    if not isinstance(source, str):
        if weights is not None:
            raise ConfigError(f"weights {weights!r} for a checkpoint that has its own: load its configuration instead")
        extensions.load()
        return source.path, None, source
    path = Path(source)
    if source.startswith("preset:"):
        from roofline.weights.random_weights import preset_checkpoint

        return path, None, preset_checkpoint(source, weights)
    if not is_bundle(path):
        extensions.load()
        from roofline.weights import sources

        path = sources.resolve(source, fetch=progress is not None, progress=progress)
    if is_bundle(path):
        if backend != "cpu" or weights is not None:
            other = f"backend {backend!r}" if backend != "cpu" else f"weights {weights!r}"
            raise ConfigError(
                f"{path} is a bundle, lowered for the cpu with its weights: {other} needs the model's files"
            )
        if not whole:
            raise ConfigError(f"{path} is a bundle, of a whole model: several ranks need the model's files")
        return path, open_bundle(path), None
    if backend == "cpu" and weights is None and whole and cached.enabled() and extensions.key() is not None:
        bundle = _cached(path, source)
        if bundle is not None:
            return path, bundle, None
    from roofline.weights.checkpoint import open_checkpoint, read_config

    if weights is None:
        return path, None, open_checkpoint(path)
    from roofline.weights.random_weights import parse, random_checkpoint

    return path, None, random_checkpoint(read_config(path), *parse(weights))


def _cached(path: Path, name: str) -> "Bundle | None":
    """The cached bundle, compiled first; None, with the reason logged, where the cache cannot be written."""
    from roofline.bundle.manifest import PlaceError

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        return cached.get(path, lambda out, key: _compile(path, name, out, key, None), say)
    except (PlaceError, CapacityError) as error:
        log.get("bundle").warning("%s is loaded without a bundle: %s", name, error)
        return None


@contextmanager
def _completing(tokenizer: "Tokenizer | None") -> Iterator[None]:
    """The tokenizer's tables are built by another thread meanwhile, where the first prompt is sure to need them."""
    if tokenizer is None or tokenizer.has_short_text_encoder:
        yield
        return
    from concurrent.futures import ThreadPoolExecutor  # 10 ms to import

    with ThreadPoolExecutor(1) as beside:
        built = beside.submit(tokenizer.complete)
        yield
        built.result()
