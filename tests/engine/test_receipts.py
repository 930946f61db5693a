"""Receipts: whatever is changed in one is noticed; computing its answers again finds the first step that differs."""

import copy
import hashlib
import json
import struct

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from engine_fakes import FakeExecutable
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.engine.receipts.receipt import (
    COMMON_NOISE,
    DIGEST,
    VERSION,
    Prompt,
    Receipt,
    ReceiptChoice,
    ReceiptSampling,
    prompt_of,
    read_answer,
    read_receipt,
)
from roofline.engine.receipts.recompute import AnswerDifference, recompute
from roofline.engine.receipts.signing import Ed25519Signer, broken_seal, damage_of, read_public_key, seal

PROMPTS = [[1, 2, 3] * 9, [4, 5]]
PARAMS = SamplingParams(seed=3, n=2, max_tokens=12, stop_token_ids=(7, 8), logit_bias={5: 0.5}, digests=True)
PEM = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()


def receipt_of(executable, version: int = VERSION) -> Receipt:
    """As a server makes it, or made it in that version."""
    engine = LocalEngine(executable)
    for number, prompt in enumerate(PROMPTS):
        engine.submit(prompt, PARAMS, request_id=str(number), common_noise=version == COMMON_NOISE)
    answers = {}
    while engine.has_work:
        for event in engine.step():
            ids, digests, _ = answers.setdefault((event.request_id, event.index), [[], [], None])
            ids += event.ids
            digests += [digest.hex() for digest in event.digests or []]
            answers[event.request_id, event.index][2] = event
    choices = [
        ReceiptChoice(
            prompt=int(name),
            sample=index,
            finish_reason=last.finish_reason,
            stop=last.stop_id,
            ids=ids,
            digests=digests,
        )
        for (name, index), (ids, digests, last) in sorted(answers.items())
    ]
    assert {choice.finish_reason for choice in choices} == {"stop", "length"}
    return Receipt(
        version=version, id="a", created=5, model="toy", fingerprint="fake", weights="w", adapter=None, digest=DIGEST,
        sampling=ReceiptSampling.of(PARAMS), end_ids=[], choices=choices,
        prompts=[prompt_of(ids, True) for ids in PROMPTS],
    )  # fmt: skip


@pytest.fixture(scope="module")
def receipt() -> Receipt:
    return receipt_of(FakeExecutable())


@pytest.fixture
def signer(tmp_path) -> Ed25519Signer:
    path = tmp_path / "key.pem"
    key = Ed25519PrivateKey.generate()
    path.write_bytes(key.private_bytes(*PEM))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(public)
    signer = Ed25519Signer(path)
    assert read_public_key(tmp_path / "public.pem") == signer.public_key
    return signer


def changes(value, path=()):
    """Each way to change one thing in plain JSON: (its path, the changed whole)."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            for where, changed in changes(value[key], (*path, key)):
                whole = copy.copy(value)
                whole[key] = changed
                yield where, whole
        if isinstance(value, list):
            yield path, [*value, *(value[-1:] or [3])]
        return
    other = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value / 2 + 0.25}
    yield path, other.get(type(value), lambda: f"{(value or '')[:-1]}{'6' if (value or '')[-1:] == '5' else '5'}")()


@pytest.mark.parametrize("signed", [False, True])
def test_whatever_is_changed_is_noticed(receipt, signer, signed, tmp_path):
    sealed = seal(receipt, signer if signed else None)
    plain, path = sealed.as_json(), tmp_path / "receipt.json"
    path.write_text(json.dumps({"choices": [], "receipt": dict(reversed(plain.items()))}, indent=3))
    assert read_receipt(path) == sealed
    assert broken_seal(sealed, signer.public_key if signed else None) is None
    count = 0
    for where, changed in changes(plain):
        path.write_text(json.dumps(changed))
        try:
            read = read_receipt(path)
        except ConfigError as error:
            refused = str(error)
            assert "is no receipt" in refused
        else:
            assert broken_seal(read), where
        count += 1
    assert count > 60


def test_the_checksum_is_of_sorted_fields_without_spaces(receipt, signer):
    """Whoever checks a receipt with another program spells it so."""
    content = seal(receipt, signer).as_json()
    checksum, signature = content.pop("checksum"), content.pop("signature")
    shuffled = json.loads(json.dumps(dict(reversed(content.items()))))
    spelled = b"roofline receipt\n" + json.dumps(shuffled, sort_keys=True, separators=(",", ":")).encode()
    assert checksum == hashlib.sha256(spelled).hexdigest()
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer.public_key)).verify(bytes.fromhex(signature), spelled)


def test_a_prompt_is_told_by_its_length_and_the_hash_of_its_ids():
    hashed = hashlib.sha256(struct.pack("<3i", 1, 70_000, 2)).hexdigest()
    assert prompt_of([1, 70_000, 2], False) == Prompt(tokens=3, sha256=hashed, ids=None)
    assert prompt_of((1, 70_000, 2), True) == Prompt(tokens=3, sha256=hashed, ids=[1, 70_000, 2])


def test_a_forged_checksum_does_not_help_without_the_key(receipt, signer, tmp_path):
    sealed = seal(receipt, signer)
    forged = seal(msgspec.structs.replace(receipt, model="better"), None)  # which has a checksum that fits
    pretended = msgspec.structs.replace(forged, public_key=signer.public_key, signature=sealed.signature)
    assert "checksum" in broken_seal(pretended)
    assert "not signed" in broken_seal(forged, signer.public_key)
    assert "taken away" in broken_seal(forged, signer.public_key)
    stripped = msgspec.structs.replace(sealed, signature=None)
    for key in (None, signer.public_key):
        assert "It was changed" in broken_seal(stripped, key)
    assert "another key" in broken_seal(sealed, "00" * 32)
    (tmp_path / "other.pem").write_bytes(Ed25519PrivateKey.generate().private_bytes(*PEM))
    assert "another key" in broken_seal(seal(receipt, Ed25519Signer(tmp_path / "other.pem")), signer.public_key)


@settings(max_examples=30, deadline=None)
@given(
    data=st.binary(max_size=60)
    | st.recursive(st.none() | st.integers() | st.text(max_size=4), st.lists).map(json.dumps)
)
def test_what_is_no_receipt_is_refused_in_a_sentence(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("receipt") / "r.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ConfigError, match=r"is no receipt|it is empty; get the file again"):
        read_receipt(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 1}, "of version 1, and this program reads versions 2 and 3"),
        ({"digest": "md5"}, "'md5'"),
        ({"choices": []}, "no answer"),
        ({"surprise": 1}, "surprise"),
        ({"end_ids": ["x"]}, "Expected `int`"),
    ],
)
def test_a_receipt_that_contradicts_itself_is_refused(receipt, tmp_path, change, words):
    (tmp_path / "r.json").write_text(json.dumps(receipt.as_json() | change))
    with pytest.raises(ConfigError, match=words):
        read_receipt(tmp_path / "r.json")


CONTRADICTIONS = {
    "choices": {
        "prompt": ((0, 1), (-1, 2), "is of a prompt or sample that it has not, or has twice"),
        "sample": ((0, 1), (-1, 2), "is of a prompt or sample that it has not, or has twice"),
        "ids": ((), ([],), "has 0 ids and "),
        "digests": ((), ([], ["0" * 32]), " ids and "),
    },
    "prompts": {
        "tokens": ((), (4, 0), "ids of"),
        "ids": ((None, [0, 5], [(1 << 31) - 1, 5]), ([4], [-1, 5], [1 << 31, 5]), "ids of 2 tokens, or ids that are"),
    },
}


@pytest.mark.parametrize(("of", "field"), [(of, field) for of, fields in CONTRADICTIONS.items() for field in fields])
def test_parts_that_contradict_the_others_are_refused(receipt, tmp_path, of, field):
    """Of two prompts with two answers each the last part of a kind is changed; of answers it is the only one left."""
    good, bad, words = CONTRADICTIONS[of][field]
    assert len(receipt.choices) == 4

    def read(value):
        content = copy.deepcopy(receipt.as_json())
        if of == "choices":
            content[of] = content[of][-1:]
        content[of][-1][field] = value
        (tmp_path / "r.json").write_text(json.dumps(content))
        return read_receipt(tmp_path / "r.json")

    for value in good:
        assert getattr(getattr(read(value), of)[-1], field) == value
    for value in bad:
        with pytest.raises(ConfigError, match=words):
            read(value)


def test_digests_are_of_their_length_and_answers_are_there_once(receipt, tmp_path):
    content = receipt.as_json()
    twice = copy.deepcopy(content)
    twice["choices"].append(twice["choices"][0])
    short, long = copy.deepcopy(content), copy.deepcopy(content)
    short["choices"][3]["digests"][-1] = "0" * 31
    no_hexadecimal = copy.deepcopy(content)
    no_hexadecimal["choices"][3]["digests"][-1] = "0" * 31 + "F"
    long["choices"][3]["digests"][-1] = "0" * 33
    for changed, words in (
        (twice, r"choices\.4 is of a prompt or sample that it has not, or has twice"),
        (short, r"choices\.3 has a digest that is not 32 hexadecimal digits"),
        (long, r"choices\.3 has a digest that is not 32 hexadecimal digits"),
        (no_hexadecimal, "no receipt that is whole, it is damaged.* 32 hexadecimal digits"),
        ({name: value for name, value in content.items() if name != "choices"}, "it is damaged: .*`choices`"),
        ({**content, "prompts": [], "choices": content["choices"]}, "it has no prompt, or no answer"),
        ({**content, "sampling": {**content["sampling"], "top_p": 0.0}}, r"sampling\.top_p"),
    ):
        (tmp_path / "r.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=words):
            read_receipt(tmp_path / "r.json")


def test_a_file_that_is_cut_off_is_told_as_damaged(receipt, tmp_path):
    whole = json.dumps(seal(receipt, None).as_json()).encode()
    for length in (2, len(whole) // 2, len(whole) - 1):
        (tmp_path / "r.json").write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=f"it is damaged: the file is cut off behind {length:,} bytes"):
            read_receipt(tmp_path / "r.json")


def test_hashes_that_do_not_fit_are_told_as_damage(receipt):
    sealed = seal(msgspec.structs.replace(receipt, prompts=[prompt_of([1, 2, 3], True)]), None)
    assert damage_of(sealed) is None
    shorter = msgspec.structs.replace(sealed, choices=sealed.choices[:-1])
    assert "It is damaged" in damage_of(shorter)
    assert broken_seal(shorter) == damage_of(shorter)
    other = msgspec.structs.replace(sealed.prompts[0], ids=[1, 2, 4])
    resealed = seal(msgspec.structs.replace(sealed, prompts=[other]), None)
    assert "the ids of prompt 0 do not have the hash" in damage_of(resealed)


@pytest.mark.parametrize(
    "data", [b"", b"-----BEGIN PRIVATE KEY-----\n", X25519PrivateKey.generate().private_bytes(*PEM)]
)
def test_other_keys_are_refused_with_the_remedy(tmp_path, data):
    (tmp_path / "key.pem").write_bytes(data)
    with pytest.raises(ConfigError, match="openssl genpkey -algorithm ed25519"):
        Ed25519Signer(tmp_path / "key.pem")


class OneBitLater(FakeExecutable):
    """From position 30 on the smallest logit has another last bit: no id changes."""

    def _row(self, row):
        logits, first = super()._row(row)
        if self.batch.positions[row] >= 30:
            least = int(np.argmin(logits))
            logits[least] = np.nextafter(logits[least], np.float32(-np.inf))
        return logits, first


def test_a_receipt_of_version_2_is_computed_with_the_noise_of_its_time(tmp_path):
    """By the seed alone; in version 3 by seed and prompt, so neither passes for the other."""
    for version, other in ((2, 3), (3, 2)):
        receipt = seal(receipt_of(FakeExecutable(), version), None)
        (tmp_path / "r.json").write_text(json.dumps(receipt.as_json()))
        read = read_receipt(tmp_path / "r.json")
        assert recompute(LocalEngine(FakeExecutable()), read, PROMPTS) is None
        renamed = msgspec.structs.replace(read, version=other)
        told = recompute(LocalEngine(FakeExecutable()), renamed, PROMPTS)
        assert told is not None
        assert told.what == "id"


def test_the_first_step_that_differs_is_told(receipt):
    def differs(executable, changed=receipt):
        return recompute(LocalEngine(executable), changed, PROMPTS)

    assert differs(FakeExecutable(tokens=5)) is None
    assert differs(FakeExecutable(weights=1)) == AnswerDifference(0, 0, "logits")
    later = differs(OneBitLater())
    step = 31 - len(PROMPTS[0])  # the row of position 30 is that of the fifth id
    assert later == AnswerDifference(0, step, "logits")
    for number, choice in enumerate(receipt.choices):
        ids = [*choice.ids[:-1], choice.ids[-1] ^ 1]
        shorter = msgspec.structs.replace(choice, ids=choice.ids[:-1], digests=choice.digests[:-1])
        for other, what in ((msgspec.structs.replace(choice, ids=ids), "id"), (shorter, "end")):
            choices = [*receipt.choices[:number], other, *receipt.choices[number + 1 :]]
            told = differs(FakeExecutable(), msgspec.structs.replace(receipt, choices=choices))
            assert told == AnswerDifference(number, len(other.ids) - 1, what)


@pytest.mark.parametrize(
    "text",
    ['{"choices": [1], "receipt": %s, "choices": [2]}', '{"receipt": %s, "usage": [{"a": {"b": 1, "c": 2, "b": 1}}]}'],
)
def test_a_file_that_has_a_field_twice_is_refused(receipt, tmp_path, text):
    (tmp_path / "r.json").write_text(text % json.dumps(receipt.as_json()))
    with pytest.raises(ConfigError, match=r"an object in it has two fields '(choices|b)'"):
        read_receipt(tmp_path / "r.json")


def with_choice(receipt, number, sampling=(), **change):
    """The receipt with one answer, and its sampling, changed."""
    choices = list(receipt.choices)
    choices[number] = msgspec.structs.replace(choices[number], **change)
    sampling = msgspec.structs.replace(receipt.sampling, **dict(sampling))
    return msgspec.structs.replace(receipt, choices=choices, sampling=sampling)


def test_an_end_is_explained_by_what_the_receipt_says(receipt):
    """Of each answer the whole, and all that is shorter, with every reason that a receipt can give."""

    def ends(changed, text_end=None):
        return recompute(LocalEngine(FakeExecutable()), changed, PROMPTS, text_end)

    for number, choice in enumerate(receipt.choices):
        last = choice.ids[-1]
        right = choice.finish_reason, choice.stop
        for reason in ("stop", "length"):
            for stop in (None, last, last ^ 1, "Z"):
                changed = with_choice(receipt, number, finish_reason=reason, stop=stop)
                told = ends(changed)
                assert (told is None) == ((reason, stop) == right), (number, reason, stop)
                assert told is None or told == AnswerDifference(number, len(choice.ids) - 1, "end")
                cut = with_choice(changed, number, ids=choice.ids[:-1], digests=choice.digests[:-1])
                assert ends(cut) == AnswerDifference(number, len(choice.ids) - 2, "end")
    number = next(at for at, choice in enumerate(receipt.choices) if choice.finish_reason == "length")
    asked = []

    def text_end(choice):
        asked.append(choice)
        return choice.stop in (None, "Z") or isinstance(choice.stop, int)

    by_string = with_choice(receipt, number, finish_reason="stop", stop="Z")
    assert ends(by_string, text_end) == AnswerDifference(number, 11, "end"), "the request did not name it"
    named = with_choice(by_string, number, sampling={"stop": ["Z"]})
    assert ends(named, text_end) is None
    assert {choice.sample for choice in asked} == {0, 1}, "every answer is asked after"
    assert ends(with_choice(named, number, finish_reason="length"), text_end) == AnswerDifference(number, 11, "end")
    assert ends(named, lambda choice: choice.stop != "Z") == AnswerDifference(number, 11, "end")
    for most in (None, 11, 13):
        assert ends(with_choice(receipt, number, sampling={"max_tokens": most})).what == "end"


@pytest.mark.parametrize("most", [None, 12])
def test_without_a_longest_length_the_context_is_it(receipt, most):
    """An answer that goes on to the end of a context of 40 tokens, and one that is cut before."""
    engine = LocalEngine(FakeExecutable(max_context=40))
    params = SamplingParams(seed=3, max_tokens=most, digests=True)
    engine.submit(PROMPTS[0], params, request_id="a")
    ids, digests = [], []
    while engine.has_work:
        for event in engine.step():
            ids += event.ids
            digests += [digest.hex() for digest in event.digests or []]
    choice = ReceiptChoice(prompt=0, sample=0, finish_reason="length", stop=None, ids=ids, digests=digests)
    prompts = [prompt_of(PROMPTS[0], True)]
    sampling = ReceiptSampling.of(params)
    told = msgspec.structs.replace(receipt, sampling=sampling, prompts=prompts, choices=[choice])
    assert len(ids) == (most or 40 - len(PROMPTS[0]))

    def differs(changed, context):
        return recompute(LocalEngine(FakeExecutable(max_context=context)), changed, PROMPTS[:1])

    assert differs(told, 40) is None
    assert differs(told, 50) == (None if most else AnswerDifference(0, len(ids) - 1, "end"))
    cut = with_choice(told, 0, ids=ids[:-1], digests=digests[:-1])
    assert differs(cut, 40) == AnswerDifference(0, len(ids) - 2, "end")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"object": "chat.completion", "choices": []}', '"receipt": true'),
        (b'{"object": "response", "output": [], "receipt": null}', '"receipt": true'),
        (b'data: {"object": "chat.completion.chunk"}\n\n', "a stream of events"),
        (b'\xef\xbb\xbf{"version": 1}', "byte order mark"),
    ],
)
def test_a_file_without_a_receipt_is_refused_with_what_to_do(tmp_path, content, words):
    (tmp_path / "answer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_answer(tmp_path / "answer.json")
