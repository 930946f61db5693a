"""Which tokens end a generation, for files that name only some of them."""

from collections.abc import Iterable

from roofline.text.tokenizers.vocabulary import AddedToken

# Ends of a turn or a text in the chat formats of the families; a file often names just one as its EOS.
END_TOKENS = frozenset(
    {
        "<|im_end|>",  # ChatML: Qwen, SmolLM2
        "<|eot_id|>",  # Llama 3
        "<|eom_id|>",  # Llama 3, tool calls
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",  # Phi 3
        "<|eot|>",  # Llama 4
        "<|return|>",
        "<end_of_turn>",  # Gemma
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",  # Command R
        "<end_of_utterance>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",  # DeepSeek
    }
)


def end_ids(file_ids: Iterable[int | None], added: Iterable[AddedToken]) -> tuple[int, ...]:
    """The ids that a file lists as ends, in its order, then those of its special tokens that END_TOKENS has."""
    ids = [token_id for token_id in file_ids if token_id is not None]
    ids += [token.id for token in added if token.special and token.content in END_TOKENS]
    return tuple(dict.fromkeys(ids))
