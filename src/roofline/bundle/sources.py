"""Where a model is read from: a bundle, a file or folder of weights, a preset, or a checkpoint in memory.

Files of weights that the cpu backend is to run are compiled into a cached bundle on first use.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.backends import table
from roofline.backends.backend import RunsBundles
from roofline.backends.compressed_rows import holds_compressed_rows
from roofline.backends.options import LoadOptions
from roofline.bundle import bundle_cache, origins
from roofline.bundle.manifest import PlaceError
from roofline.bundle.origins import BundleOrigin
from roofline.bundle.reader import Bundle, is_bundle, open_bundle
from roofline.common import extensions, files, log
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    from roofline.bundle.writer import WriteReport, WrittenBundle
    from roofline.weights.checkpoint import Checkpoint

Progress = Callable[[str, int, int | None], None]  # see weights.sources.pull


def open_source(
    source: "str | Checkpoint",
    options: LoadOptions,
    progress: Progress | None = None,
    *,
    needs_text: bool = False,
    warns: bool = True,
) -> "tuple[Path, Bundle | Checkpoint]":
    """The model's path, and its bundle, where the backend runs bundles and one process runs it all, or its checkpoint;
    with longrope's short factors where max_model_len is not above the original context, for which files are needed.

    Args:
        needs_text: a tokenizer that cannot be read is an error before the weights are read.
        warns: log where the cache of bundles cannot be written; False where another process of the program does.

    Raises ConfigError where the source cannot be read, or is a bundle and the options need a checkpoint.
    """
    path, model = _open_source(source, options, progress, needs_text, warns)
    if not isinstance(model, Bundle):
        if options.guesses:
            _check_guesses(path, model)
        model = _in_form(model, options)
    config = model.manifest.config if isinstance(model, Bundle) else model.config
    scaling, longest = config.get("rope_scaling"), config.get("max_position")
    # A bundle's configuration is checked where it is loaded: until then any value may be anything.
    if not isinstance(scaling, dict) or scaling.get("rope_type") != "longrope":
        return path, model
    original = scaling.get("original_max_position_embeddings")
    if not isinstance(original, (int, float)) or not isinstance(longest, int):
        return path, model
    if options.max_model_len is None or not options.max_model_len <= original < longest:
        return path, model
    if is_bundle(path):
        what = f"{path} has the rope factors of contexts above {original:,.0f} tokens, and max_model_len is not"
        raise ConfigError(f"{what}: load the files it was compiled from, or leave max_model_len out")
    if isinstance(model, Bundle):
        from roofline.weights import checkpoint

        model = _in_form(checkpoint.open_checkpoint(path), options)
    return path, replace(model, config={**model.config, "max_position": int(original)})


def _check_guesses(path: Path, checkpoint: "Checkpoint") -> None:
    """Raise UnsupportedError for a model of a family whose layer that guesses is not read, in whatever files."""
    from roofline.weights.families.table import families_with_guessing, files_of

    family = checkpoint.config["family"]
    if not files_of(family).NAMES.has_guessing:
        others = ", ".join(families_with_guessing())
        reason = f"no layer that guesses is read of {family} models, even where files hold one, but of {others}"
        raise UnsupportedError(f"speculate='mtp' for {path}", reason, ("speculate='ngram'", "speculate='draft'"))


def _open_source(
    source: "str | Checkpoint", options: LoadOptions, progress: Progress | None, needs_text: bool, warns: bool
) -> "tuple[Path, Bundle | Checkpoint]":
    """The same with a configuration as the files say it."""
    weights = options.weights
    if not isinstance(source, str):
        if weights is not None:
            raise ConfigError(f"weights {weights!r} for a checkpoint that has its own: load its configuration instead")
        extensions.load()
        return source.path, source
    path = Path(source)
    if source.startswith("preset:"):
        from roofline.weights.random_weights import preset_checkpoint

        return path, preset_checkpoint(source, weights, lambda config: holds_compressed_rows(options, config))
    if not is_bundle(path):
        extensions.load()
        from roofline.weights import sources

        path = sources.resolve(source, fetch=progress is not None, progress=progress)
    runs_bundles = isinstance(table.get(options.backend), RunsBundles)
    if is_bundle(path):
        if not runs_bundles or weights is not None:
            other = f"weights {weights!r}" if runs_bundles else f"backend {options.backend!r}"
            raise ConfigError(
                f"{path} is a bundle, lowered for the cpu with its weights: {other} needs the model's files"
            )
        if options.ranks > 1:
            raise ConfigError(f"{path} is a bundle, of a whole model: several ranks need the model's files")
        if options.guesses:
            raise ConfigError(f"{path} is a bundle, of a model without its layer that guesses: name the model's files")
        return path, open_bundle(path)
    bundled = runs_bundles and weights is None and options.ranks == 1 and not options.guesses
    if bundled and bundle_cache.enabled() and extensions.key() is not None:
        with files.readable(path):
            bundle = _cached_bundle(path, source, needs_text, warns)
        if bundle is not None:
            return path, bundle
    from roofline.weights import checkpoint

    if weights is None:
        return path, checkpoint.open_checkpoint(path)
    from roofline.weights.latent_form import latent_config
    from roofline.weights.random_weights import parse, random_checkpoint

    plain = checkpoint.read_config(path)
    config = latent_config(plain, holds_compressed_rows(options, plain))
    return path, random_checkpoint(config, *parse(weights))


def _in_form(checkpoint: "Checkpoint", options: LoadOptions) -> "Checkpoint":
    """A checkpoint with the matrices that the options' backend takes of attention over compressed rows."""
    if not checkpoint.config.get("kv_rank"):
        return checkpoint
    from roofline.weights.latent_form import latent_form

    return latent_form(checkpoint, holds_compressed_rows(options, checkpoint.config))


def open_checkpoint(source: str, options: LoadOptions) -> "Checkpoint":
    """The model's checkpoint, for options with which no bundle is run. Raises ConfigError as `open_source`."""
    _, model = open_source(source, options)
    assert not isinstance(model, Bundle), "another backend than cpu, or several ranks"
    return model


def compile_model(
    source: str, out: Path, *, threads: int | None = None, progress: Progress | None = None
) -> "WrittenBundle":
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
    with files.readable(path):
        key = bundle_cache.key_of(path)
    return _compile(path, out, key, threads)


def _compile(
    path: Path,
    out: Path,
    key: str,
    threads: int | None = None,
    needs_text: bool = False,
    report: "WriteReport | None" = None,
) -> "WrittenBundle":
    from roofline.backends.cpu.select import choose_threads
    from roofline.bundle.writer import write_bundle
    from roofline.weights import checkpoint

    count = int(choose_threads(threads).value)
    opened = _in_form(checkpoint.open_checkpoint(path), LoadOptions(backend="cpu"))
    written = write_bundle(opened, out, threads=count, needs_text=needs_text, report=report)
    origins.remember(written.bundle_id, BundleOrigin(str(path.resolve()), key))
    return written


def _cached_bundle(path: Path, name: str, needs_text: bool, warns: bool) -> Bundle | None:
    """The cached bundle, compiled first; None where the cache cannot be written."""
    say = partial(print, file=sys.stderr, flush=True)
    try:
        return bundle_cache.get(path, lambda out, key, report: _compile(path, out, key, None, needs_text, report), say)
    except (PlaceError, CapacityError) as error:
        if warns:
            log.get("bundle").warning("%s is loaded without a bundle: %s", name, error)
        return None
