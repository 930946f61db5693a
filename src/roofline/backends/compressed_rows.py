"""Which backend keeps the compressed rows of attention in its cache (`models.latent`)."""

from roofline.backends import table
from roofline.backends.backend import HoldsCompressedRows
from roofline.backends.options import LoadOptions
from roofline.common.json_types import JsonMapping


def holds_compressed_rows(options: LoadOptions, config: JsonMapping) -> bool:
    """Return whether the options' backend keeps them for a model; False of one that has none. config: fields of its
    ModelConfig."""
    backend = table.get(options.backend)
    if not config.get("kv_rank") or not isinstance(backend, HoldsCompressedRows):
        return False
    return backend.holds_compressed_rows(options, config)
