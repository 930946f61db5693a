"""Small random models and a small tokenizer of transformers, for the tests of roofline.torch."""

from typing import Any

import torch
import transformers

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", BASE),
    "llama3_tied": ("Llama", BASE | {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "mistral_window": ("Mistral", BASE | {"sliding_window": 9}),
    "qwen2": ("Qwen2", BASE),
    "qwen3_tied": ("Qwen3", BASE | {"tie_word_embeddings": True}),
    "mpt": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "expansion_ratio": 4, "vocab_size": 300}),
}


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with random weights in every parameter, norms and biases too."""
    kind, fields = CASES[name]
    attention = {} if kind == "Mpt" else {"attn_implementation": "eager"}
    config = getattr(transformers, f"{kind}Config")(**{**fields, **changes}, **attention)
    generator = torch.Generator().manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 + ("norm" in parameter_name))
    return model.to(dtype)


def ids(*shape: int, seed: int = 1, vocab: int = 300) -> torch.Tensor:
    """Random ids."""
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def tokenizer() -> Any:
    """A byte-level BPE of at most 300 tokens with an end token and a chat template."""
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    inner.train_from_iterator(["the cat and the dog and the hat"] * 20, trainer)
    start = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.post_processor = start
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    made.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant:"
    return made
