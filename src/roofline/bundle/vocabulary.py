"""Whether two models speak of the same tokens when they say the same ids."""

from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError

if TYPE_CHECKING:
    from roofline.bundle.loader import LoadedModel


def check_draft(model: "LoadedModel", draft: "LoadedModel") -> None:
    """Refuse a draft model whose ids mean something else. Both must be loaded with their text side.

    Raises:
        ConfigError: the message names the first difference.
    """
    sizes = model.executable.vocab_size, draft.executable.vocab_size
    if sizes[0] != sizes[1]:
        raise _refusal(model, draft, f"it has {sizes[1]:,} ids and the model {sizes[0]:,}")
    assert model.tokenizer is not None, "loaded with the text side"
    assert draft.tokenizer is not None, "loaded with the text side"
    ours, theirs = model.tokenizer, draft.tokenizer
    if model.path == draft.path or ours.vocabulary.tokens == theirs.vocabulary.tokens:
        return
    for token in range(sizes[0]):
        if ours.token_bytes(token) != theirs.token_bytes(token):
            what = f"id {token} is {theirs.token_bytes(token)!r} there and {ours.token_bytes(token)!r} in the model"
            raise _refusal(model, draft, what)


def _refusal(model: "LoadedModel", draft: "LoadedModel", difference: str) -> ConfigError:
    return ConfigError(
        f"{draft.name} cannot draft for {model.name}: {difference}. Choose a smaller model of the same family."
    )
