"""Continues a run from a checkpoint: its own last one, or the one that load_path names."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.train.checkpoint import checkpoint, manifest, state
from roofline.train.storage.open import open_store
from roofline.train.storage.store import Store, UnreachableError

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

NAME_IT = "name it in load_path"
_log = log.get("train")


def resume(run: "Run") -> None:
    """Load the last checkpoint in the run's own folder if autoresume finds one, else that of load_path, if any.

    autoresume=previous takes the last one that is what was written. Raises ConfigError if a checkpoint is damaged, with
    the name of the last good one before it, or if the run would overwrite checkpoints without being told to.
    """
    config, own = run.config, open_store(run.save_folder)
    existing: list[int] = run.world.share(manifest.steps(own)) if config.autoresume or run.save_every else []
    if existing and config.autoresume:
        last = _last_intact(run, own, existing) if config.autoresume == "previous" else existing[-1]
        _load(run, own, last, "autoresume=previous goes on from there")
        run.saver.replaced = [step for step in existing if step > last]
        # An earlier process may have been killed between saving and deleting.
        if run.world.rank == 0 and not run.saver.replaced:
            checkpoint.prune(own, config.save_num_checkpoints_to_keep)
        return
    if existing and run.save_every and not config.save_overwrite:
        raise ConfigError(
            f"{own.url} holds checkpoints up to step {existing[-1]}: autoresume=true goes on from there, "
            "save_overwrite=true writes over them"
        )
    if config.load_path is not None:
        place, step = manifest.open_place(config.load_path)
        if step is None:
            steps = run.world.share(manifest.steps(place))
            if not steps:
                raise ConfigError(f"load_path: {place.url} holds no complete checkpoint")
            step = steps[-1]
        if config.load_weights_only:
            with _previous_named(run, place, step, NAME_IT):
                checkpoint.load(place, step, state.weights(run), run.world.grouped)
        else:
            _load(run, place, step, NAME_IT)
    run.saver.replaced = [step for step in existing if step > run.progress.step]


def _last_intact(run: "Run", place: Store, steps: Sequence[int]) -> int:
    """The last checkpoint that is what was written. Raises ConfigError if there is none."""
    own = checkpoint.last_intact(place, steps) if run.world.rank == 0 else None
    step = run.world.share(own)
    if step is None:
        raise ConfigError(
            f"autoresume=previous: of the {len(steps)} checkpoints in {place.url} none is what was written: begin anew "
            "with save_overwrite=true and without autoresume"
        )
    if step != steps[-1] and run.world.rank == 0:
        _log.warning("%s: going on from step %d, the last checkpoint that is whole", place.url, step)
    return step


@contextmanager
def _previous_named(run: "Run", place: Store, step: int, remedy: str) -> Iterator[None]:
    """Around the loading of a checkpoint: where that is damaged, the error names the last good one before it.

    All ranks must fail together, as they do in `checkpoint.load`.
    """
    try:
        yield
    except UnreachableError:  # perhaps of this rank alone
        raise
    except ConfigError as error:
        message = run.world.share(checkpoint.damage(place, step, error, remedy) if run.world.rank == 0 else None)
        if message is None:
            raise
        raise ConfigError(message) from error


def _load(run: "Run", place: Store, step: int, remedy: str) -> None:
    run.optimizer.prepare()
    tensors = state.tensors(run)
    with _previous_named(run, place, step, remedy):
        facts = run.world.share(manifest.facts(place, step))
    state.check_base(run, facts)
    state.check_optimizer(run, facts)
    with _previous_named(run, place, step, remedy):
        checkpoint.load(place, step, tensors, run.world.grouped)
    state.restore(run, facts, tensors)
