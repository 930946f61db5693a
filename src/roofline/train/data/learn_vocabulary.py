"""A byte-level BPE vocabulary learnt from texts, written as Hugging Face writes tokenizers."""

import json
from collections.abc import Iterable
from pathlib import Path

from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically

END = "<|endoftext|>"
# A model that was never taught turns of a conversation: what is said is text to go on from.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_BYTES = 256


def learn(texts: Iterable[str], folder: Path, size: int) -> int:
    """Writes tokenizer.json and tokenizer_config.json into a new folder; the number of tokens it came to.

    size: tokens at most, the end token among them; texts with fewer repeated pairs give fewer.
    Raises ConfigError where size has no room for the bytes, or the folder holds something.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size <= _BYTES + 1:
        raise ConfigError(f"a vocabulary of {size} tokens: the bytes and the end token alone are {_BYTES + 1}")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} holds something already: name a new folder")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=1) + "\n")
    write_atomically(folder / "tokenizer.json", tokenizer.to_str())
    return int(tokenizer.get_vocab_size())
