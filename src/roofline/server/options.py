"""The options of serving a model over HTTP. Cheap to import: the engine process is started before HTTP is."""

import contextlib
from dataclasses import dataclass, field

from roofline.backends.options import DEFAULT_MODEL, LoadOptions
from roofline.common.errors import ConfigError
from roofline.common.options import Options, option
from roofline.engine.config import EngineConfig
from roofline.server.limits import Limits

TOPIC = "Serving"


@dataclass(frozen=True)
class ServeOptions(Options):
    """What to serve, and where.

    Args:
        model: a name, hub id or path.
        load: how the model is loaded. engine: how each engine runs; `draft` is the name, hub id or path of the draft
            model that it may guess with.
    """

    model: str = DEFAULT_MODEL
    host: str = option("127.0.0.1", "Address to listen on.", topic=TOPIC)
    port: int = option(8000, "Port; 0 takes a free one.", minimum=0, maximum=65535, topic=TOPIC)
    api_key: str | None = option(None, "Needed on every route but /health. Default: ROOFLINE_API_KEY.", topic=TOPIC)
    served_model_name: str | None = option(None, "The name that requests give. Default: MODEL.", topic=TOPIC)
    data_parallel: int = option(
        1, "Replicas of the model that share the requests, and the cores.",
        flags=("--data-parallel", "--dp"), minimum=1, unit="replicas", topic="Several ranks",
    )  # fmt: skip
    draft: str | None = None
    load: LoadOptions = field(default_factory=LoadOptions)
    engine: EngineConfig = field(default_factory=EngineConfig)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.engine.speculate == "draft") != (self.draft is not None):
            raise ConfigError("speculating with a draft model needs both --speculate draft and --draft MODEL")
        if self.api_key is not None and (not self.api_key.strip() or not self.api_key.isascii()):
            raise ConfigError("the API key must be ASCII and not empty")

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the address."""
        import ipaddress

        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"
