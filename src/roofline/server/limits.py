"""Every bound of the HTTP side in one place. All are on by default."""

from dataclasses import dataclass, field, fields
from typing import TypeVar

from roofline.common.json_types import JsonObject
from roofline.engine.config import EngineConfig

T = TypeVar("T", int, float)


def limit(default: T, unit: str, about: str) -> T:
    """A field of `Limits`: how many of what, of what at most."""
    return field(default=default, metadata={"unit": unit, "about": about})


@dataclass(frozen=True)
class Limits:
    """What one request, and all together, may ask for. GET /limits lists all, with what they are of."""

    body_bytes: int = limit(8 << 20, "bytes", "a request's body")
    header_bytes: int = limit(16 << 10, "bytes", "a request's headers together")
    waiting_bytes: int = limit(64 << 20, "bytes", "bodies of about one size that wait to be read")
    json_depth: int = limit(32, "levels", "nesting of the JSON of a body")
    json_values: int = limit(1 << 17, "values", "strings, names of fields among them, objects and arrays of a body")
    messages: int = limit(1024, "messages", "in one conversation")
    prompts: int = limit(64, "prompts", "in one completion request")
    inputs: int = limit(2048, "texts", "in one request for embeddings; together they are within prompt_tokens")
    documents: int = limit(1024, "texts", "that one request has ranked or scored")
    tools: int = limit(128, "tools", "that one request describes")
    tool_name_characters: int = limit(64, "characters", "the name of a tool")
    n: int = limit(16, "answers", "to each prompt")
    choices: int = limit(128, "answers", "of one request: prompts times n")
    logprobs: int = limit(20, "tokens", "alternatives whose log-probability is told")
    prompt_logprobs: int = limit(1 << 18, "log-probabilities", "of prompts: their tokens times alternatives and one")
    temperature: float = limit(2.0, "", "the largest one")
    stop_strings: int = limit(16, "strings", "that end an answer")
    stop_string_bytes: int = limit(256, "bytes", "one of them")
    stop_token_ids: int = limit(64, "ids", "that end an answer")
    logit_bias: int = limit(1024, "ids", "that are biased")
    user_characters: int = limit(256, "characters", "a label of the client's: user, safety_identifier, cache_salt")
    prompt_tokens: int = limit(1 << 20, "tokens", "the prompts of one request together; each must fit the context")
    stored_responses: int = limit(10_000, "responses", "kept by /v1/responses, of all keys; 0: none")
    stored_bytes: int = limit(128 << 20, "bytes", "of kept responses and what they answer")
    stored_seconds: float = limit(30 * 86400.0, "seconds", "a response is kept since it was last gone on from")
    adapter_bytes: int = limit(EngineConfig.adapter_bytes, "bytes", "LoRA adapters that are loaded, together")
    queued: int = limit(256, "requests", "that wait for their first token, of all keys")
    streams: int = limit(256, "requests", "that a key may have open at a time, unless its entry says otherwise")
    first_token_seconds: float = limit(1800.0, "seconds", "until the first token; 0: no limit")
    total_seconds: float = limit(7200.0, "seconds", "until an answer is complete; 0: no limit")
    read_seconds: float = limit(30.0, "seconds", "silence while a request is being received")
    unread_seconds: float = limit(60.0, "seconds", "until a client takes more of what waits to be sent to it")
    unread_tokens: int = limit(4096, "tokens", "of a stream that wait for its client; four alternatives count as one")
    body_seconds: float = limit(120.0, "seconds", "until a request's body is complete")
    upload_bytes: int = limit(200 << 20, "bytes", "a file that is uploaded, with the form around it")
    upload_seconds: float = limit(3600.0, "seconds", "until an upload is complete")
    key_file_bytes: int = limit(2 << 30, "bytes", "the files of a key together, with the answers of its batches")
    key_files: int = limit(1000, "files", "that a key has")
    batch_lines: int = limit(50_000, "requests", "in one batch")
    open_batches: int = limit(32, "batches", "of a key that have not ended")
    kept_batches: int = limit(1000, "batches", "of a key that are remembered; the oldest that ended are forgotten")
    batch_hours: int = limit(720, "hours", "the longest completion_window")
    metadata_pairs: int = limit(16, "pairs", "in the metadata of a batch")
    metadata_name_characters: int = limit(64, "characters", "the name of one of them")
    metadata_value_characters: int = limit(512, "characters", "the value of one of them")
    drain_seconds: int = limit(30, "seconds", "that answers may still take when the server is told to end")

    def listed(self) -> JsonObject:
        """Each limit by name, with its unit and what it is of."""
        return {each.name: {"limit": getattr(self, each.name), **each.metadata} for each in fields(self)}
