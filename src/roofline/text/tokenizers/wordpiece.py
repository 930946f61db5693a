"""BERT's tokenizer, for files that do not say it in steps: GGUF files and vocab.txt."""

from roofline.text.tokenizers.vocabulary import JsonObject

MAX_CHARACTERS = 100  # of a word; a longer one is unknown, as in BERT's own code


def word_pieces(unknown: str, lowercase: bool, strip_accents: bool | None, chinese_apart: bool = True) -> JsonObject:
    """Fields of the vocabulary of a WordPiece model with ## before a word's further tokens.

    unknown: the token for words that no tokens spell. strip_accents: None: where letters are lowered. chinese_apart:
    each Chinese character is a word.
    """
    return {
        "model": "WordPiece",
        "options": {
            "unk_token": unknown,
            "max_input_chars_per_word": MAX_CHARACTERS,
            "continuing_subword_prefix": "##",
        },
        "pipeline": {
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": chinese_apart,
                "strip_accents": strip_accents,
                "lowercase": lowercase,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        },
        "byte_level": False,
        "continues": "##",
        "joins_signs": True,
        "strip_space": True,
    }
