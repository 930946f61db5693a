"""Continues a run from a checkpoint: its own last one, or the one that load_path names."""

from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.train.checkpoint import checkpoint, manifest, state
from roofline.train.storage.open import open_store
from roofline.train.storage.store import Store

if TYPE_CHECKING:
    from roofline.train.run.loop import Run


def resume(run: "Run") -> None:
    """Load the last checkpoint in the run's own folder if autoresume finds one, else that of load_path, if any.

    Raises ConfigError if the run would overwrite checkpoints without being told to.
    """
    config, own = run.config, open_store(run.save_folder)
    existing = run.world.share(manifest.steps(own)) if config.autoresume or run.save_every else []
    if existing and config.autoresume:
        _load(run, own, existing[-1])
        if run.world.rank == 0:  # an earlier process may have been killed between saving and deleting
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
            checkpoint.load(place, step, state.weights(run), run.world.grouped)
        else:
            _load(run, place, step)
    run.saver.replaced = [step for step in existing if step > run.progress.step]


def _load(run: "Run", place: Store, step: int) -> None:
    facts = run.world.share(manifest.facts(place, step))
    run.optimizer.prepare()
    tensors = state.tensors(run)
    checkpoint.load(place, step, tensors, run.world.grouped)
    state.restore(run, facts, tensors)
