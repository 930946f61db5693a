"""How tokens are written that are words: the spaces between them are in no token (WordPiece, WordLevel)."""

# Behind a word without a space, in transformers as here.
_JOINED = (".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re")


def word_text(token: str, continues: str, joins_signs: bool) -> str:
    """The text of a token behind another one. continues, joins_signs: see `Vocabulary`."""
    if not token:
        return ""
    if continues and token.startswith(continues):
        return token[len(continues) :]
    text = f" {token}"
    if joins_signs:
        for sign in _JOINED:
            text = text.replace(f" {sign}", sign)
    return text
