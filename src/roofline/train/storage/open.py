"""Opens the store that a folder or URL names: the one place that knows every kind of store."""

from pathlib import Path

from roofline.common.errors import ConfigError
from roofline.train.storage.bucket import SCHEMES, ObjectStore
from roofline.train.storage.local import LocalStore
from roofline.train.storage.store import Patience, Store


def open_store(url: str | Path, patience: Patience | None = None) -> Store:
    """The store at a local folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix.

    Keys and endpoint of an object store come from the environment variables that its other clients use:
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL, AWS_ALLOW_HTTP and so on; GOOGLE_*; AZURE_*.
    No request is sent before the store's first method call. Raises ConfigError on a URL of another kind.
    """
    scheme, colon, location = str(url).partition("://")
    if isinstance(url, Path) or not colon:
        return LocalStore(Path(url))
    if scheme == "file" and location.startswith("/"):
        return LocalStore(Path(location))
    if scheme not in SCHEMES:
        places = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"{url}: no place that objects are kept in: use a folder, or one of {places}")
    return ObjectStore(str(url), patience or Patience())
