"""What a cluster runs, and with how much of it."""

import re
from dataclasses import dataclass
from typing import Literal

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.common.options import Options, option
from roofline.deploy.files.dockerfile import Chip

Autoscaler = Literal["none", "hpa", "keda"]
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")  # a name to which the objects add words of their own
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
QUANTITY = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?")


@dataclass(frozen=True)
class KubernetesOptions(Options):
    """A fleet in a cluster."""

    image: str = option("", "The server's image as the cluster pulls it. Default: roofline:CHIP.")
    name: str = option("roofline", "Name of the objects, and of the service.")
    namespace: str | None = option(None, "Their namespace. Default: the one that kubectl uses.")
    replicas: int = option(2, "Pods of the server; with an autoscaler, at the beginning.", minimum=1, maximum=1000)
    chip: Chip = option("cpu", "What a pod computes on.")
    devices: int = option(1, "GPUs of a pod, as many as its --tp and --pp take.", minimum=1, maximum=64)
    cores: int | None = option(None, "Cores of a pod; needed for --chip cpu.", minimum=1, unit="cores")
    memory: str | None = option(None, "Memory of a pod, such as 16Gi: `roofline info MODEL` tells what it takes.")
    storage: str | None = option(None, "Size of the volume of models, such as 50Gi; needed unless MODEL is a path.")
    storage_class: str | None = option(None, "Its class. Default: the cluster's.")
    access: Literal["ReadWriteMany", "ReadWriteOnce"] = option(
        "ReadWriteMany", "How the volume can be mounted; ReadWriteOnce where all pods run on one node."
    )
    keys: str = option("roofline-keys", "Secret with the file of keys (`roofline keys new`), as keys.toml.")
    autoscaler: Autoscaler = option(
        "none", "What changes the number of pods with the load: Kubernetes' own (hpa, which needs an adapter of "
        "Prometheus' metrics) or KEDA (which asks Prometheus).",
    )  # fmt: skip
    requests_per_replica: int | None = option(
        None, "Requests that one pod computes at a time, of which --utilisation is a share; for an autoscaler.",
        minimum=1, unit="requests",
    )  # fmt: skip
    prometheus: str = option("http://prometheus.monitoring:9090", "Address of Prometheus, for KEDA.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, pattern in (("name", LABEL), ("keys", NAMESPACE), ("namespace", NAMESPACE)):
            value = getattr(self, field)
            if value is not None and not pattern.fullmatch(value):
                raise ConfigError(f"{field}={value!r} cannot be used: give small letters, digits and dashes")
        for field in ("memory", "storage"):
            value = getattr(self, field)
            if value is not None and not QUANTITY.fullmatch(value):
                raise ConfigError(f"{field}={value!r} is no amount of Kubernetes: give one such as 16Gi")
        if self.chip == "cpu" and self.cores is None:
            raise ConfigError("cores is needed for chip=cpu: a pod without a number of cores has those of all others")
        if self.memory is None:
            raise ConfigError("memory is needed: `roofline info MODEL` tells what a model takes; give one such as 16Gi")
        if self.autoscaler != "none" and self.requests_per_replica is None:
            raise ConfigError(f"autoscaler={self.autoscaler} needs requests_per_replica")


def metadata_of(options: KubernetesOptions, part: str = "") -> JsonObject:
    """Return the name, namespace and labels of an object. part: behind the fleet's name."""
    labels = {"app.kubernetes.io/name": "roofline", "app.kubernetes.io/instance": options.name}
    place = {"namespace": options.namespace} if options.namespace else {}
    return {"name": f"{options.name}{part}", **place, "labels": labels}
