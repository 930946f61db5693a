"""The body of TGI's routes. A field is honoured, or listed in NEUTRAL and refused beyond those values."""

from typing import Literal

from roofline.server.body import Body

# Of parameters: what clients send and we do not have, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "decoder_input_details": (None, False),
    "typical_p": (None, 1, 1.0),
    "watermark": (None, False),
}
INSTEAD = {
    "best_of": "Ask several times with other seeds and choose among the answers",
}


class Grammar(Body):
    """The form of an answer: a JSON schema (as "json", or as "json_schema" with a name beside it), or a regex."""

    type: Literal["json", "json_schema", "regex"]
    value: str | dict[str, object]


class Parameters(Body):
    """do_sample: false, the default, takes the most likely token, unless a temperature, top_k or top_p says otherwise.

    details: the tokens of the answer and why it ended. top_n_tokens: beside each of them, the most likely ones.
    truncate: only so many tokens of the prompt are read, the last ones.
    """

    adapter_id: str | None = None
    details: bool | None = None
    do_sample: bool | None = None
    frequency_penalty: float | None = None
    grammar: Grammar | None = None
    max_new_tokens: int | None = None
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    seed: int | None = None
    stop: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_n_tokens: int | None = None
    top_p: float | None = None
    truncate: int | None = None


class GenerateBody(Body):
    """POST /generate, /generate_stream. stream: as /generate_stream answers."""

    inputs: str
    parameters: Parameters | None = None
    stream: bool | None = None
