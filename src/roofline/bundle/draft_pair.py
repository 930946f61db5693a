"""A model and the draft model that guesses for it, loaded together: what one takes, the other must leave."""

from roofline.bundle.loader import LoadedModel, load
from roofline.bundle.vocabulary import check_draft
from roofline.common.json_types import JsonMapping
from roofline.ops.batch import PAGE_TOKENS


def load_with_draft(
    model: str, options: JsonMapping, draft: str, draft_options: JsonMapping
) -> tuple[LoadedModel, LoadedModel]:
    """Both as `load` gives them, with their text sides, and of one vocabulary.

    On a GPU the model's cache is as large as leaves room for the draft model with as many tokens in its own, which it
    then gets, whatever `cache_tokens` its options have.

    Raises ConfigError, UnsupportedError, CapacityError: as `load` and `check_draft`.
    """
    options, draft_options = {**options, "text": True}, {**draft_options, "text": True}
    if options.get("backend") == "gpu":
        loaded = load(model, **options, draft=draft)
        draft_options["cache_tokens"] = loaded.executable.num_pages * PAGE_TOKENS
    else:
        loaded = load(model, **options)
    guesser = load(draft, **draft_options)
    check_draft(loaded, guesser)
    return loaded, guesser
