"""What a receipt says: which answer a model gave to a prompt, with digests of the logits that each id came from.

Anyone with the same weights computes the answer again and compares (`recompute.py`). A receipt is JSON. Its checksum
and its signature are of `sealed_bytes`, so how a client wrote its JSON again, in which order or with which spaces,
does not matter.
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Literal, NoReturn

import msgspec
import numpy as np

from roofline.common.errors import ConfigError, RequestError
from roofline.common.files import read_regular
from roofline.common.json_names import repeated_name
from roofline.common.json_types import JsonObject
from roofline.common.mistaken_files import unreadable
from roofline.engine.constraint import Constraint, Kind
from roofline.engine.digests import DIGEST_BYTES
from roofline.engine.params import SamplingParams

VERSION = 3
COMMON_NOISE = 2  # the version before: the noise of sampling was the seed's alone, the same for every prompt
DIGEST = "sha256/16 of float32"  # of each step: the first 16 bytes of SHA-256 of its logits
MAX_RECEIPT = 256 << 20  # bytes of a file
SEAL = b"roofline receipt\n"  # what is signed begins with it, so that no signature of something else fits


class ReceiptPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a receipt: a field that it does not have makes the receipt none."""


class ReceiptForm(ReceiptPart, frozen=True, omit_defaults=True):
    """The form that the answers were held to, as `Constraint`."""

    kind: Kind
    text: str
    begun: str = ""
    behind: str = ""


class ReceiptSampling(ReceiptPart, frozen=True):
    """The fields of `SamplingParams` that ids depend on."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: list[tuple[int, float]]
    seed: int
    n: int
    max_tokens: int | None
    min_tokens: int
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    constraint: ReceiptForm | None

    @classmethod
    def of(cls, params: SamplingParams) -> "ReceiptSampling":
        """Those of a request, whose seed is known."""
        values = {name: getattr(params, name) for name in cls.__struct_fields__}
        form = params.constraint
        values["constraint"] = None if form is None else ReceiptForm(**vars(form))
        values |= {name: list(values[name]) for name in ("logit_bias", "stop", "stop_token_ids")}
        return cls(**values)

    def params(self, max_tokens: int) -> SamplingParams:
        """What computes the answers again, with digests, to a length of `max_tokens`. Raises RequestError."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        form = self.constraint
        values["constraint"] = None if form is None else Constraint(form.kind, form.text, form.begun, form.behind)
        values |= {"stop": (), "max_tokens": max_tokens, "min_tokens": min(self.min_tokens, max_tokens)}
        return SamplingParams(**values, digests=True)


class Prompt(ReceiptPart, frozen=True):
    """A prompt by its length and the hash of its ids; ids: the prompt itself, where the request allowed it."""

    tokens: int
    sha256: str
    ids: list[int] | None = None


class ReceiptChoice(ReceiptPart, frozen=True):
    """One answer. prompt, sample: which of the request's prompts it is of, and which of that prompt's n; stop: the
    string or id that ended it; digests: of the logits that each of `ids` was sampled from, in hexadecimal."""

    prompt: int
    sample: int
    finish_reason: Literal["stop", "length"]
    stop: str | int | None
    ids: list[int]
    digests: list[str]


class Receipt(ReceiptPart, frozen=True):
    """A receipt. created: Unix time; weights: their hash; adapter: the digest of the LoRA adapter, if any; end_ids: the
    model's own that end an answer; public_key: Ed25519's, in hexadecimal, where there is a signature; checksum: SHA-256
    of what is signed."""

    version: int
    id: str
    created: int
    model: str
    fingerprint: str
    weights: str
    adapter: str | None
    digest: str
    sampling: ReceiptSampling
    end_ids: list[int]
    prompts: list[Prompt]
    choices: list[ReceiptChoice]
    public_key: str | None = None
    checksum: str = ""
    signature: str | None = None

    def sealed_bytes(self) -> bytes:
        """Return the bytes that checksum and signature are of: everything but the two, in one spelling."""
        content = msgspec.to_builtins(self)
        del content["checksum"], content["signature"]
        return SEAL + json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    def as_json(self) -> JsonObject:
        """The receipt as plain values."""
        content: JsonObject = msgspec.to_builtins(self)
        return content


def hash_of_ids(ids: Iterable[int]) -> str:
    """SHA-256 of token ids as little-endian int32, in hexadecimal."""
    return sha256(np.fromiter(ids, "<i4").tobytes()).hexdigest()


def prompt_of(ids: Sequence[int], with_ids: bool) -> Prompt:
    """A prompt in a receipt."""
    return Prompt(tokens=len(ids), sha256=hash_of_ids(ids), ids=list(ids) if with_ids else None)


def read_receipt(path: Path) -> Receipt:
    """The receipt in a file, which may also be a complete answer that has one. Raises ConfigError for what is none."""
    return read_answer(path)[0]


def read_answer(path: Path) -> tuple[Receipt, JsonObject | None]:
    """The receipt in a file, and the complete answer that it stands in; None: the file is the receipt alone. Raises
    ConfigError for what is none."""
    data = read_regular(path, MAX_RECEIPT)
    try:
        content = msgspec.json.decode(data)
        twin = repeated_name(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        if data.lstrip()[:1] == b"{" and "truncated" in str(error):  # msgspec's word
            _refuse_damaged(path, f"the file is cut off behind {len(data):,} bytes, in the middle of its JSON")
        message = f"{path} is no receipt: it is not JSON: {error}{_hint(data)}"
        raise unreadable(path, message) from error
    if twin is not None:
        _refuse(path, f"an object in it has two fields {twin[:100]!r}, of which any reader may take either")
    answer = content if isinstance(content, dict) and "receipt" in content else None
    if answer is not None:
        content = answer["receipt"]
    if content is None or (isinstance(content, dict) and "object" in content and "digest" not in content):
        _refuse(path, 'the answer has none: ask for one with "receipt": true in the request')
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version not in (COMMON_NOISE, VERSION):
        _refuse(path, f"it is of version {version}, and this program reads versions {COMMON_NOISE} and {VERSION}")
    try:
        receipt = msgspec.convert(content, Receipt)
    except (msgspec.MsgspecError, RecursionError) as error:
        if version in (COMMON_NOISE, VERSION) and "missing required field" in str(error):
            _refuse_damaged(path, str(error))
        _refuse(path, str(error))
    _check(path, receipt)
    return receipt, answer


def _hint(data: bytes) -> str:
    """What a file that is no JSON may be, and what to do about it."""
    if data.startswith(b"\xef\xbb\xbf"):
        return "; it begins with a byte order mark: save it without"
    if data.lstrip().startswith((b"data:", b"event:", b": ping")):
        return "; it is a stream of events: save the JSON behind `data:` of the event that has a receipt"
    return "; name the file of an answer with a receipt, as the server sent it"


def _check(path: Path, receipt: Receipt) -> None:
    """Raises ConfigError for a receipt that contradicts itself."""
    if receipt.digest != DIGEST:
        _refuse(path, f"its digests are {receipt.digest[:40]!r}, and this program computes {DIGEST!r}")
    if not receipt.prompts or not receipt.choices:
        _refuse(path, "it has no prompt, or no answer")
    try:
        receipt.sampling.params(1)
    except RequestError as error:
        _refuse(path, f"sampling.{error}")
    pairs: set[tuple[int, int]] = set()
    for at, choice in enumerate(receipt.choices):
        place = (choice.prompt, choice.sample)
        if (
            not (0 <= choice.prompt < len(receipt.prompts) and 0 <= choice.sample < receipt.sampling.n)
            or place in pairs
        ):
            _refuse(path, f"choices.{at} is of a prompt or sample that it has not, or has twice")
        pairs.add(place)
        if not choice.ids or len(choice.ids) != len(choice.digests):
            _refuse_damaged(path, f"choices.{at} has {len(choice.ids)} ids and {len(choice.digests)} digests")
        if not all(map(_is_digest, choice.digests)):
            _refuse_damaged(path, f"choices.{at} has a digest that is not {2 * DIGEST_BYTES} hexadecimal digits")
    for at, prompt in enumerate(receipt.prompts):
        ids = prompt.ids
        if ids is not None and (len(ids) != prompt.tokens or not all(0 <= each < 1 << 31 for each in ids)):
            _refuse_damaged(path, f"prompts.{at} has {len(ids)} ids of {prompt.tokens} tokens, or ids that are none")


def _is_digest(text: str) -> bool:
    return len(text) == 2 * DIGEST_BYTES and not text.strip("0123456789abcdef")


def _refuse(path: Path, problem: str) -> NoReturn:
    raise ConfigError(f"{path} is no receipt: {problem}")


def _refuse_damaged(path: Path, problem: str) -> NoReturn:
    """Raises ConfigError for a receipt of which a part is missing or was changed."""
    raise ConfigError(f"{path} is no receipt that is whole, it is damaged: {problem}; get the answer's file again")
