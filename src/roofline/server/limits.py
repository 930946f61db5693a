"""Every bound of the HTTP side in one place. All are on by default."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, times in seconds, the rest in pieces."""

    body_bytes: int = 8 << 20
    header_bytes: int = 16 << 10
    json_depth: int = 32
    messages: int = 1024
    prompts: int = 64  # in one completion request
    n: int = 16
    choices: int = 128  # prompts x n
    logprobs: int = 20
    stop_strings: int = 16
    stop_string_bytes: int = 256
    stop_token_ids: int = 64
    logit_bias: int = 1024
    user_characters: int = 256
    queued: int = 256  # requests that wait for their first token
    read_seconds: float = 30.0  # silence while a request is being received
    drain_seconds: int = 30  # what runs may finish after SIGTERM
    error_bytes: int = 8 << 10
