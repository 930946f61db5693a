"""Signatures of receipts: Ed25519, so that whoever has the public key alone can tell who computed an answer."""

from hashlib import sha256
from pathlib import Path
from typing import Protocol

import msgspec

from roofline.common.errors import ConfigError
from roofline.common.extras import named_packages
from roofline.common.files import read_regular
from roofline.engine.receipts.receipt import Receipt, hash_of_ids

MAX_KEY = 64 << 10  # bytes of a file
MAKE = "openssl genpkey -algorithm ed25519 -out FILE"


class Signer(Protocol):
    """A private key."""

    public_key: str  # 32 bytes in hexadecimal

    def sign(self, data: bytes) -> str:
        """The signature of `data`, 64 bytes in hexadecimal."""


class Ed25519Signer:
    """The private key in a PEM file. Raises ConfigError for a file that has none, UnsupportedError without the package
    `cryptography`."""

    @named_packages()
    def __init__(self, path: Path) -> None:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        data = read_regular(path, MAX_KEY)
        try:
            key = load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it is encrypted
            raise ConfigError(f"{path} has no private key that can be read: {error}. Make one: {MAKE}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"{path} has another kind of key than Ed25519. Make one: {MAKE}")
        self._key, self.public_key = key, key.public_key().public_bytes_raw().hex()

    def sign(self, data: bytes) -> str:
        return self._key.sign(data).hex()


@named_packages()
def read_public_key(path: Path) -> str:
    """The Ed25519 public key in a PEM file, in hexadecimal. Raises as `Ed25519Signer`."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    remedy = "Write it with: openssl pkey -in PRIVATE -pubout -out FILE"
    data = read_regular(path, MAX_KEY)
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} has no public key that can be read. {remedy}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path} has another kind of key than Ed25519. {remedy}")
    return key.public_bytes_raw().hex()


def seal(receipt: Receipt, signer: Signer | None) -> Receipt:
    """The receipt with its checksum and, where there is a key, its signature."""
    receipt = msgspec.structs.replace(receipt, public_key=signer.public_key if signer is not None else None)
    data = receipt.sealed_bytes()
    signature = signer.sign(data) if signer is not None else None
    return msgspec.structs.replace(receipt, checksum=sha256(data).hexdigest(), signature=signature)


def damage_of(receipt: Receipt) -> str | None:
    """Which of a receipt's own hashes does not fit its content, in a sentence; None: all of them do."""
    if sha256(receipt.sealed_bytes()).hexdigest() != receipt.checksum:
        return (
            "It is damaged: its content does not fit its own checksum, so it was cut off or changed after it was made."
        )
    for number, prompt in enumerate(receipt.prompts):
        if prompt.ids is not None and hash_of_ids(prompt.ids) != prompt.sha256:
            return f"It is damaged: the ids of prompt {number} do not have the hash beside them."
    return None


def broken_seal(receipt: Receipt, public_key: str | None = None) -> str | None:
    """Why a receipt is not what was sealed, in a sentence; None where it is.

    public_key: that it must be signed with. None: a signature must fit the key in the receipt, which proves that
    nothing was changed since, but not by whom it was computed.
    """
    damage = damage_of(receipt)
    if damage is not None:
        return damage
    if receipt.signature is None:
        if receipt.public_key is not None:
            return "It was changed: it names a public key, and has no signature."
        if public_key is not None:
            return "It is not signed: it comes from a server without --receipt-key, or its signature was taken away."
        return None
    if public_key is not None and receipt.public_key != public_key:
        return "It is signed with another key than that of --public-key."
    if not _fits(receipt.public_key or "", receipt.signature, receipt.sealed_bytes()):
        return "It was changed: its content does not fit its signature."
    return None


@named_packages()
def _fits(public_key: str, signature: str, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):  # ValueError: no hexadecimal, or not 32 bytes
        return False
    return True
