"""Learns a byte-level BPE vocabulary from texts and writes it in the files of a Hugging Face tokenizer."""

import json
from collections.abc import Iterable
from pathlib import Path

from roofline.common.errors import ConfigError
from roofline.common.files import write_atomically

END = "<|endoftext|>"
# The model was never trained on conversations: messages are simply text to continue.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_BYTES = 256


def learn(texts: Iterable[str], folder: Path, size: int) -> int:
    """Write tokenizer.json and tokenizer_config.json into a new folder; returns the number of tokens.

    size: most tokens, the end token included; texts with few repeated pairs give fewer.
    Raises ConfigError if size has no room for the 256 bytes, or if the folder is not empty.
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
        vocab_size=size, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=1) + "\n")
    write_atomically(folder / "tokenizer.json", tokenizer.to_str())
    return int(tokenizer.get_vocab_size())
