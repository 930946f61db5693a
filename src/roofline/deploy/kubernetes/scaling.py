"""The policy of `deploy/scaling.py` as Kubernetes' autoscaler and KEDA have it.

Both compute as it does: as many replicas as the open requests need, at once for more, and for fewer the largest need of
`calm_seconds`. Targets of latency are of the supervisor of `roofline up` alone.
"""

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.json_types import JsonObject
from roofline.deploy.kubernetes.options import KubernetesOptions, metadata_of
from roofline.deploy.scaling import ScalingTargets

OPEN_REQUESTS = "roofline_open_requests"  # of a pod: a rule of the metrics' adapter gives it that name
QUERY = "sum(vllm:num_requests_running{{{0}}}) + sum(vllm:num_requests_waiting{{{0}}})"
ASK_SECONDS = 2  # between two looks of KEDA


def autoscaler_of(options: KubernetesOptions, targets: ScalingTargets) -> JsonObject | None:
    """Return the object that changes the number of pods, None for a fixed one. Raises ConfigError for targets without
    an autoscaler, UnsupportedError for none of the pods under Kubernetes' own."""
    if options.autoscaler == "none":
        if changes := targets.changes():
            raise ConfigError(f"{next(iter(changes))} is about a number of pods that changes: give autoscaler")
        return None
    if targets.max_replicas < max(1, targets.min_replicas):
        raise ConfigError(f"max_replicas={targets.max_replicas} is less than min_replicas={targets.min_replicas}")
    if options.autoscaler == "hpa" and targets.min_replicas < 1:
        raise UnsupportedError("min_replicas=0 with autoscaler=hpa", "it keeps one pod", ("autoscaler=keda",))
    return _horizontal(options, targets) if options.autoscaler == "hpa" else _keda(options, targets)


def open_requests(options: KubernetesOptions, targets: ScalingTargets) -> str:
    """Return the number of open requests that a pod should have, as an amount of Kubernetes."""
    share = 1.0 if targets.utilisation is None else targets.utilisation
    return f"{max(1, round(1000 * share * (options.requests_per_replica or 1)))}m"


def behavior(targets: ScalingTargets) -> JsonObject:
    """Return how fast the number of pods changes, in the words of autoscaling/v2."""
    calm = round(targets.calm_seconds)
    shrinkage = {"type": "Percent", "value": max(1, round(100 * targets.shrinkage)), "periodSeconds": max(1, calm)}
    one = {"type": "Pods", "value": 1, "periodSeconds": max(1, calm)}
    # A load step is met at once: as many pods as the open requests need.
    at_once = {"type": "Percent", "value": 10_000, "periodSeconds": 15}
    return {
        "scaleUp": {"stabilizationWindowSeconds": 0, "selectPolicy": "Max", "policies": [at_once]},
        "scaleDown": {"stabilizationWindowSeconds": calm, "selectPolicy": "Max", "policies": [shrinkage, one]},
    }


def _horizontal(options: KubernetesOptions, targets: ScalingTargets) -> JsonObject:
    metric = {"metric": {"name": OPEN_REQUESTS}}
    target = {"type": "AverageValue", "averageValue": open_requests(options, targets)}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata_of(options),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": options.name},
            "minReplicas": targets.min_replicas,
            "maxReplicas": targets.max_replicas,
            "metrics": [{"type": "Pods", "pods": {**metric, "target": target}}],
            "behavior": behavior(targets),
        },
    }


def _keda(options: KubernetesOptions, targets: ScalingTargets) -> JsonObject:
    selected = f'namespace="{options.namespace}",' if options.namespace else ""
    query = QUERY.format(f'{selected}pod=~"{options.name}-.+"')
    threshold = round(int(open_requests(options, targets).removesuffix("m")) / 1000, 3)
    trigger = {"serverAddress": options.prometheus, "query": query, "threshold": f"{threshold:g}"}
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata_of(options),
        "spec": {
            "scaleTargetRef": {"name": options.name},
            "minReplicaCount": targets.min_replicas,
            "maxReplicaCount": targets.max_replicas,
            "pollingInterval": ASK_SECONDS,
            "cooldownPeriod": round(targets.idle_seconds),
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior(targets)}},
            "triggers": [{"type": "prometheus", "metadata": trigger}],
        },
    }
