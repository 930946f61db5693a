"""What a service promises of nearly all requests: MLPerf's limits by name, or limits of one's own."""

import math
from dataclasses import dataclass

from roofline.common.errors import ConfigError
from roofline.common.names import unknown

LIMITS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Objective:
    """Limits in milliseconds, infinite where nothing is promised. share: of the requests that must be within."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf
    share: float = 0.99

    @property
    def rule(self) -> str:
        """The limits in words."""
        names = {"ttft": "TTFT from scheduled", "tpot": "TPOT", "e2e": "latency from scheduled"}
        return " and ".join(f"{names[name]} <= {getattr(self, name):g} ms" for name in LIMITS if self.limit(name))

    def limit(self, name: str) -> float | None:
        """The limit of a name of LIMITS, None where nothing is promised."""
        value: float = getattr(self, name)
        return value if math.isfinite(value) else None


# MLPerf Inference, server and interactive scenarios (loadgen/mlperf.conf): the 99th percentiles of TTFT and TPOT.
OBJECTIVES = {
    "mlperf:llama2-70b": Objective(2000, 200),
    "mlperf:llama2-70b-interactive": Objective(450, 40),
    "mlperf:llama3.1-8b": Objective(2000, 100),
    "mlperf:llama3.1-8b-interactive": Objective(500, 30),
    "mlperf:llama3.1-405b": Objective(6000, 175),
    "mlperf:llama3.1-405b-interactive": Objective(4500, 80),
    "mlperf:mixtral-8x7b": Objective(2000, 200),
    "mlperf:deepseek-r1": Objective(2000, 80),
    "mlperf:deepseek-r1-interactive": Objective(1500, 15),
}


def read_objective(text: str, option_name: str) -> Objective:
    """A name of OBJECTIVES, or limits in milliseconds such as ttft=2000,tpot=200,e2e=30000. option_name: that the text
    is the value of. Raises ConfigError for what is neither."""
    if "=" not in text:
        if text not in OBJECTIVES:
            raise ConfigError(f"{unknown('objective', text, OBJECTIVES)}; or write limits in ms: ttft=2000,tpot=200")
        return OBJECTIVES[text]
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = (word.strip() for word in part.partition("="))
        if name in limits:
            raise ConfigError(f"{option_name}={text!r} has two limits of {name}: leave one of them out")
        try:
            limits[name] = float(number)
        except ValueError:
            limits = {}
        if name not in LIMITS or not 0 < limits.get(name, 0) < math.inf:
            raise ConfigError(
                f"{option_name}={text!r}: {part!r} is no limit in ms; write ttft=2000,tpot=200,e2e=30000, or "
                "mlperf:NAME"
            )
    return Objective(**limits)
