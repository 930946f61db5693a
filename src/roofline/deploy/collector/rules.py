"""What a gauge of several replicas is together: a table by name, as no figure says whether it can be added."""

from collections.abc import Callable, Sequence
from statistics import fmean

GaugeRule = Callable[[Sequence[float]], float]

# Name -> how the fleet's value is made of those of its replicas; None: there is none, each replica's stands alone.
# tests/deploy/collector compares the names with all gauges that the server has.
GAUGE_RULES: dict[str, GaugeRule | None] = {
    "vllm:num_requests_running": sum,
    "vllm:num_requests_waiting": sum,
    "roofline:state_slots": sum,
    "roofline:state_slots_used": sum,
    "vllm:kv_cache_usage_perc": fmean,  # shares of caches of one size
    "roofline:share_of_roof": fmean,
    "roofline:engine_up": min,  # 0 where any replica's engine does not answer
    "roofline:golden_kl": max,  # the worst of each
    "roofline:golden_top1_agreement": min,
    "roofline:golden_within_thresholds": min,
    "roofline:golden_fallback": max,
    "vllm:cache_config_info": max,  # always 1, sizes are labels
    # Of the engines within one server (--data-parallel), which it numbers from 0: a sum over servers would add engines
    # that have nothing in common but their number.
    "roofline:replica_up": None,
    "roofline:replica_requests_running": None,
    "roofline:replica_requests_waiting": None,
    "roofline:replica_outstanding_tokens": None,
    "roofline:replica_restarts": None,
}


def gauge_rule(name: str) -> GaugeRule | None:
    """Return how gauges of this name make one of the fleet; None where they do not, as of names that are unknown."""
    return GAUGE_RULES.get(name)
