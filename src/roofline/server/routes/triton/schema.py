"""The body of the generate extension. A field is honoured, or listed in NEUTRAL and refused beyond those values.

Fields may stand in the body or in its `parameters`; the names are those of Triton's backends for vLLM and TensorRT-LLM.
"""

from roofline.server.body import Body

NEUTRAL: dict[str, tuple[object, ...]] = {
    "bad_words": (None, "", []),
    "beam_width": (None, 1),
    "best_of": (None, 1),
    "embedding_bias_words": (None, []),
    "end_id": (None,),
    "pad_id": (None,),
    "return_context_logits": (None, False),
    "return_generation_logits": (None, False),
    "return_log_probs": (None, False),
}
INSTEAD = {
    "end_id": "The model's own ids end an answer; stop_token_ids of /v1/completions adds others",
    "return_log_probs": "logprobs of /v1/completions gives them",
}


class GenerateBody(Body):
    """exclude_input_in_output: false puts the prompt before the answer, unless that is streamed; default: true.

    random_seed, stop_words, min_length: other names of seed, stop, min_tokens.
    """

    id: str | None = None
    text_input: str
    stream: bool | None = None
    exclude_input_in_output: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    min_length: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    random_seed: int | None = None
    stop: str | list[str] | None = None
    stop_words: str | list[str] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
