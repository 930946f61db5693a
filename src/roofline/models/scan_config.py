"""What configurations say of layers of Mamba and of Mamba-2 alike."""

from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.models.recurrent import RecurrentConfig


@dataclass(frozen=True)
class ScanConfig(RecurrentConfig):
    """recurrent: of each layer, whether it is a scan; the others attend.

    Of the former: inner: channels; states: of a channel; taps: tokens that its convolution sees; conv_bias: the
    convolution has a bias.
    """

    inner: int = 0
    states: int = 0
    taps: int = 4
    conv_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in {"inner": 1, "states": 1, "taps": 2}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"model config: {name}={getattr(self, name)} is not at least {least}")
        if len(self.recurrent) != self.layers:
            raise ConfigError(f"model config: recurrent has {len(self.recurrent)} values for {self.layers} layers")

    @property
    def absent(self) -> tuple[str, ...]:
        return ("heads", "kv_heads", "head_dim") if all(self.recurrent) else ()

    @property
    def scans(self) -> tuple[int, ...]:
        """The layers that are scans."""
        return tuple(layer for layer, recurrent in enumerate(self.recurrent) if recurrent)
