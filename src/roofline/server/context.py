"""What every route works with, made once and never edited."""

from dataclasses import dataclass, field

from starlette.requests import Request

from roofline.common.errors import RequestError
from roofline.engine.facade import AsyncEngine
from roofline.engine.process.messages import Ready
from roofline.server.limits import Limits
from roofline.server.metrics import Metrics
from roofline.server.text_side import TextSide


@dataclass(frozen=True)
class Context:
    """The served model and the means to answer."""

    engine: AsyncEngine
    text: TextSide
    name: str  # of the model: requests must give it
    created: int  # Unix time of the start, as /v1/models reports it
    host: str = "127.0.0.1"  # the server's address; on a loopback one without a key only local Host names are served
    api_key: str | None = None  # None leaves all routes open
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)

    def loaded(self) -> Ready:
        """The description of the loaded model. Raises RequestError 503 while no engine is ready."""
        description = self.engine.description
        if description is None or not self.engine.ready:
            raise RequestError(503, "engine_not_ready", "The engine is not ready. Try again in a moment.")
        return description


def of(request: Request) -> Context:
    """The context of the app that got `request`."""
    return request.app.state.context
