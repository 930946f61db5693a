"""A model and the draft model that guesses for it, loaded together: what one takes, the other must leave."""

from roofline.bundle.loader import LoadedModel, load
from roofline.common.errors import ConfigError
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


def check_draft(model: LoadedModel, draft: LoadedModel) -> None:
    """Raises ConfigError, which names the first difference, for a draft model whose ids mean something else.

    Both must be loaded with their text side.
    """

    def refusal(difference: str) -> ConfigError:
        remedy = "Choose a smaller model of the same family."
        return ConfigError(f"{draft.name} cannot draft for {model.name}: {difference}. {remedy}")

    sizes = model.executable.vocab_size, draft.executable.vocab_size
    if sizes[0] != sizes[1]:
        raise refusal(f"it has {sizes[1]:,} ids and the model {sizes[0]:,}")
    assert model.tokenizer is not None, "loaded with the text side"
    assert draft.tokenizer is not None, "loaded with the text side"
    if model.path == draft.path or model.tokenizer.vocabulary.tokens == draft.tokenizer.vocabulary.tokens:
        return
    for token in range(sizes[0]):
        ours, theirs = model.tokenizer.token_bytes(token), draft.tokenizer.token_bytes(token)
        if ours != theirs:
            raise refusal(f"id {token} is {theirs!r} there and {ours!r} in the model")
