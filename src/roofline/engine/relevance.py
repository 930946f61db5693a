"""How well a document answers a query, by the logits of any chat model: how likely "yes" is, of "yes" and "no".

The model is asked in a conversation whether the document answers the query, and is told to say yes or no. The score is
the probability of "yes" where these two are all there is: the softmax of two logits of the answer's first token. Asking
so, for "true" and "false", is monoT5's way (Nogueira et al. 2020, arXiv:2003.06713); with "yes" and "no" it is that of
Qwen3-Reranker (Zhang et al. 2025, arXiv:2506.05176), whose marks <Instruct>, <Query> and <Document> are used here too.
Nothing is sampled, so a score's bits depend on model and texts alone.

An encoder answers nothing: its score is the cosine between the vectors of query and document, as vLLM has it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roofline.common.errors import RequestError, UnsupportedError
from roofline.engine.pooling import Pooling

if TYPE_CHECKING:
    from roofline.text.tokenizers.tokenizer import Tokenizer

INSTRUCTION = "Find passages that answer the query."  # where a request has none of its own
QUESTION = 'Decide whether the document meets the instruction for the query. Answer with one word, "yes" or "no".'
VARIABLES: Mapping[str, Any] = {"enable_thinking": False}  # a template that knows it leaves the reasoning empty


def pair_messages(query: str, document: str, instruction: str | None = None) -> list[dict[str, object]]:
    """The conversation about a pair. The document stands last, so that pairs of one query share their beginning."""
    parts = QUESTION, f"<Instruct>: {instruction or INSTRUCTION}", f"<Query>: {query}", f"<Document>: {document}"
    return [{"role": "user", "content": "\n".join(parts)}]


def check_instruction(instruction: str | None) -> None:
    """Raises RequestError for an instruction to an encoder."""
    if instruction is not None:
        problem = "an encoder compares the vectors of two texts and is told nothing else; leave it out"
        raise RequestError(400, "unsupported_value", f"instruction: {problem}", param="instruction")


def yes_or_no(tokenizer: "Tokenizer") -> Pooling:
    """The logits that a score is made of: of the first tokens of "yes" and "no". Raises UnsupportedError where these
    are the same."""
    yes, no = (tokenizer.encode(word, add_special=False)[0] for word in ("yes", "no"))
    if yes == no:
        raise UnsupportedError("scores by this model", 'its "yes" and "no" begin with the same token', ("embeddings",))
    return Pooling("logits", (yes, no))
