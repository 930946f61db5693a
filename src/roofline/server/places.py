"""Paths among the options of serving, tried before anything is loaded: a wrong one costs no waiting then."""

import os
from pathlib import Path
from tempfile import TemporaryFile

from roofline.common.errors import ConfigError
from roofline.common.files import cause_of
from roofline.server.options import ServeOptions


def check_places(options: ServeOptions) -> None:
    """Make the folders that are written into, and read the files that are read.

    Raises:
        ConfigError: a path cannot be used, with the cause.
        UnsupportedError: a package that a key needs is missing.
    """
    if options.batch_folder is not None:
        _check_batch_folder(options.batch_folder)
    if options.engine.record is not None:
        _check_folder("record", Path(options.engine.record))
    if options.response_store is not None and options.max_stored_responses > 0:
        from roofline.server.routes.responses.store import check_file

        check_file(options.response_store)
    _check_keys(options)
    if options.adapter:
        from roofline.server.adapters import named_path
        from roofline.weights.adapters import check_adapter

        for path in [named_path(argument)[1] for argument in options.adapter]:
            check_adapter(path, options.effective_limits().adapter_bytes)
    if options.extra_model:
        from roofline.server.extra_models import check_extra_models

        check_extra_models(options)


def check_output(path: Path) -> None:
    """Raises ConfigError where a file cannot be written, which is left as it is and not made."""
    try:
        if path.exists():
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        else:
            TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {cause_of(error)}") from error


def _check_batch_folder(folder: Path) -> None:
    from roofline.server.batches.files import lock_folder

    for part in (folder, folder / "files", folder / "batches"):
        _check_folder("batch_folder", part)
    lock_folder(folder).close()


def _check_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{option}={str(folder)!r}: the folder cannot be written: {cause_of(error)}") from error


def _check_keys(options: ServeOptions) -> None:
    if options.api_keys is not None:
        from roofline.server.keys import Keys

        Keys(file=options.api_keys)
    if options.tls_certificate is not None and options.tls_key is not None:
        from roofline.server.tls import Certificate

        Certificate(options.tls_certificate, options.tls_key)
    if options.receipt_key is not None:
        from roofline.engine.receipts.signing import Ed25519Signer

        Ed25519Signer(options.receipt_key)
