"""Text sides for routes that need more of a tokenizer than the fake one of conftest has."""

from roofline.server.text_side import TextSide
from roofline.text.templates.template import CHATML, ChatTemplate
from roofline.text.tokenizers.pretokenizers import byte_level_pipeline
from roofline.text.tokenizers.tokenizer import Tokenizer
from roofline.text.tokenizers.vocabulary import AddedToken, Vocabulary, byte_alphabet

BOS, START, END = 256, 257, 258


def chatml() -> TextSide:
    """Tokens are bytes, beside a BOS and the two of ChatML, which end at 258."""
    alphabet = byte_alphabet()
    words = sorted(alphabet, key=lambda character: alphabet[character])
    added = [AddedToken(BOS, "<s>", True), AddedToken(START, "<|im_start|>", True), AddedToken(END, "<|im_end|>", True)]
    vocabulary = Vocabulary(
        "BPE", words, pipeline=byte_level_pipeline("gpt-2"), added=added, bos_id=BOS, eos_ids=(END,), prefix=(BOS,)
    )
    return TextSide(Tokenizer(vocabulary), ChatTemplate(CHATML, bos_token="<s>", eos_token="<|im_end|>"))
