"""A model and the draft model that guesses for it, loaded together: what one takes, the other must leave."""

from dataclasses import replace

from roofline.backends.backend import Neighbours
from roofline.backends.options import LoadOptions
from roofline.bundle.loader import ALONE, LoadedModel, load
from roofline.bundle.sources import open_checkpoint
from roofline.bundle.vocabulary import check_draft
from roofline.ops.batch import PAGE_TOKENS


def load_with_draft(
    model: str, options: LoadOptions, draft: str, draft_options: LoadOptions, neighbours: Neighbours = ALONE
) -> tuple[LoadedModel, LoadedModel]:
    """Both as `load` gives them, with their text sides, and of one vocabulary.

    On a GPU the model's cache is as large as leaves room for the draft model with as many tokens in its own, which it
    then gets, whatever `cache_tokens` its options have. Where the model has several ranks, the draft runs beside its
    rank 0, on the first device of the group.

    Raises ConfigError, UnsupportedError, CapacityError: as `load` and `check_draft`.
    """
    on_gpu = options.backend == "gpu"
    if on_gpu:
        neighbours = replace(neighbours, draft=open_checkpoint(draft, draft_options))
    loaded = load(model, options, neighbours=neighbours)
    if on_gpu:
        draft_options = replace(draft_options, cache_tokens=loaded.executable.num_pages * PAGE_TOKENS)
    replica, replicas = neighbours.replica * options.ranks, neighbours.replicas * options.ranks
    guesser = load(draft, draft_options, neighbours=Neighbours(replica, replicas) if neighbours.replicas > 1 else ALONE)
    check_draft(loaded, guesser)
    return loaded, guesser
