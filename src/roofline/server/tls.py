"""TLS: a certificate and its key from files, which are read again when they change."""

import ssl
from pathlib import Path

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.server.watched import WatchedFiles

LOG = log.get("server")


class Certificate:
    """What connections are made with. Raises ConfigError for files that cannot be used; where they become so later, the
    certificate that was read before stays.

    context: to listen with. Each connection takes the newest certificate as it begins; open ones go on.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self._watched = WatchedFiles(certificate, key)
        self.context = self._newest = self._load()
        # OpenSSL calls this for each connection, also where the client names no server. Loading into the context that
        # listens would leave it without a usable pair where the new files do not fit each other.
        self.context.sni_callback = self._choose

    def refresh(self, force: bool = False) -> None:
        """Read the files again where they changed, or in any case."""
        if not (self._watched.changed() or force):
            return
        try:
            self._newest = self._load()
        except ConfigError as error:
            LOG.error("%s. The certificate that was read before stays.", str(error).rstrip("."))
            return
        LOG.info("%s: new connections have this certificate", self._certificate)

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # A password of no length: an encrypted key is an error, and no question on the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except OSError as error:  # ssl.SSLError is one too
            reason = getattr(error, "reason", None) or error.strerror or type(error).__name__
            files = f"--tls-certificate {self._certificate} and --tls-key {self._key}"
            raise ConfigError(f"{files} are no certificate with its key: {reason}") from error
        return context
