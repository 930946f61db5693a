"""GPT-2: learned positions, layer norms, biases everywhere. Source: Radford et al. 2019, and the published weights."""

from roofline.common.errors import UnsupportedError
from roofline.models import mpt
from roofline.models.config import ModelConfig

spec, embed, block, head = mpt.spec, mpt.embed, mpt.block, mpt.head


def check(cfg: ModelConfig) -> None:
    """Raises UnsupportedError on what this family does not have."""
    mpt.check(cfg)
    if cfg.positions != "learned" or not cfg.bias or cfg.rms or cfg.gated:
        what = f"positions={cfg.positions!r}, bias={cfg.bias}, rms or gated in a gpt2 model"
        raise UnsupportedError(what, "it has learned positions, layer norms, biases and no gate", ["family mpt"])
