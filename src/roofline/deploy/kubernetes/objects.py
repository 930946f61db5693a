"""The objects that serve: pods with their volume, an address, and how few of them may be gone at a time.

The volume is filled once, by a job, for all pods, which mount it to read and wait until it is full. Probes need no key:
/health says that a process lives, /ready that it answers. A pod that is to leave is taken out of the service first,
and finishes what it has.
"""

import hashlib
from dataclasses import dataclass
from pathlib import PurePosixPath

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.deploy.files.dockerfile import PORT, USER_ID
from roofline.deploy.files.stopping import stop_seconds
from roofline.deploy.kubernetes.options import KubernetesOptions, metadata_of
from roofline.deploy.kubernetes.scaling import autoscaler_of
from roofline.deploy.scaling import ScalingTargets

HOME, KEYS = "/var/cache/roofline", "/etc/roofline/keys"
LEAVE_SECONDS = 5  # until no more requests come to a pod that is to leave
START_SECONDS, START_PERIOD = 1800, 5  # in which a model is loaded
RESOURCES = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}


@dataclass(frozen=True, kw_only=True)
class KubernetesFleet:
    """The objects of a fleet. model: a name, which a job pulls into the volume, or a path within the image; words: of
    `roofline serve`, behind the model."""

    options: KubernetesOptions
    scaling: ScalingTargets
    model: str
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self._pulls and self.options.storage is None:
            raise ConfigError("storage is needed: the size of the volume that the model is pulled into, such as 50Gi")

    def text(self) -> str:
        """Return all objects as YAML documents, with what has to be done first."""
        documents = [_as_yaml(part) for part in self.objects()]
        where = f" --namespace {self.options.namespace}" if self.options.namespace else ""
        heading = (
            "# The image is built by `roofline deploy docker`. Keys of clients come first:\n"
            "#   roofline keys new NAME >> keys.toml\n"
            f"#   kubectl create secret generic {self.options.keys} --from-file=keys.toml{where}\n"
        )
        return heading + "---\n" + "---\n".join(documents)

    def objects(self) -> list[JsonObject]:
        """Return the objects in the order in which they are made."""
        volume = [self._claim(), self._filling()] if self._pulls else []
        scaler = autoscaler_of(self.options, self.scaling)
        return [*volume, self._deployment(), self._service(), self._disruptions(), *([scaler] if scaler else [])]

    @property
    def _pulls(self) -> bool:
        """Whether the model comes from elsewhere."""
        return not PurePosixPath(self.model).is_absolute()

    @property
    def _mark(self) -> str:
        """What names the filling of a model: another model is another job."""
        return hashlib.sha256(self.model.encode()).hexdigest()[:10]

    @property
    def _selector(self) -> JsonObject:
        """The labels by which the pods of the server are known; the job's pod has others."""
        return {"app.kubernetes.io/instance": self.options.name, "app": "serve"}

    @property
    def _image(self) -> str:
        return self.options.image or f"roofline:{self.options.chip}"

    def _claim(self) -> JsonObject:
        options = self.options
        named = {"storageClassName": options.storage_class} if options.storage_class else {}
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata_of(self.options, "-models"),
            "spec": {
                "accessModes": [options.access],
                **named,
                "resources": {"requests": {"storage": options.storage}},
            },
        }

    def _filling(self) -> JsonObject:
        """The job that pulls the model. It writes a mark at the end, which pods wait for."""
        script = 'roofline pull "$MODEL" && touch "$ROOFLINE_HOME/models/.$MARK"'
        pull = self._container("fill", ["sh", "-c", script], [{"name": "models", "mountPath": f"{HOME}/models"}])
        pull["env"] += [{"name": "MODEL", "value": self.model}, {"name": "MARK", "value": self._mark}]
        pod = {
            "restartPolicy": "OnFailure",
            "automountServiceAccountToken": False,
            "securityContext": _pod_security(),
            "containers": [pull],
            "volumes": [self._volume(), {"name": "home", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
        }
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata_of(self.options, f"-fill-{self._mark}"),
            "spec": {"backoffLimit": 6, "template": {"metadata": {"labels": {"app": "fill"}}, "spec": pod}},
        }

    def _volume(self) -> JsonObject:
        return {"name": "models", "persistentVolumeClaim": {"claimName": f"{self.options.name}-models"}}

    def _container(self, name: str, command: list[str], mounts: list[JsonObject]) -> JsonObject:
        return {
            "name": name,
            "image": self._image,
            "command": command,
            # What compilers of kernels keep goes where a home would be, and the image's cannot be written.
            "env": [{"name": "ROOFLINE_HOME", "value": HOME}, {"name": "HOME", "value": "/tmp"}],
            "volumeMounts": [
                {"name": "home", "mountPath": HOME},
                *mounts,
                {"name": "tmp", "mountPath": "/tmp"},
            ],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        }

    def _deployment(self) -> JsonObject:
        options, selector = self.options, self._selector
        scaled = options.autoscaler != "none"
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata_of(self.options),
            "spec": {
                # An autoscaler's number would be taken back by the next `kubectl apply`.
                **({} if scaled else {"replicas": options.replicas}),
                "selector": {"matchLabels": selector},
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
                "template": {
                    "metadata": {
                        "labels": {"app.kubernetes.io/name": "roofline", **selector},
                        "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT)},
                    },
                    "spec": self._pod(),
                },
            },
        }

    def _pod(self) -> JsonObject:
        wait = 'until [ -e "$ROOFLINE_HOME/models/.$MARK" ]; do sleep 2; done'
        mounts = [{"name": "models", "mountPath": f"{HOME}/models", "readOnly": True}] if self._pulls else []
        waiting = self._container("wait", ["sh", "-c", wait], mounts)
        waiting["env"].append({"name": "MARK", "value": self._mark})
        volumes = [self._volume()] if self._pulls else []
        return {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": LEAVE_SECONDS + stop_seconds(self.words),
            "securityContext": _pod_security(),
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": self._selector},
                }
            ],
            **({"initContainers": [waiting]} if self._pulls else {}),
            "containers": [self._server(mounts)],
            "volumes": [
                *volumes,
                {"name": "home", "emptyDir": {}},
                {"name": "tmp", "emptyDir": {}},
                {"name": "keys", "secret": {"secretName": self.options.keys}},
            ],
        }

    def _server(self, mounts: list[JsonObject]) -> JsonObject:
        keys = {"name": "keys", "mountPath": KEYS, "readOnly": True}
        server = self._container("serve", ["roofline"], [*mounts, keys])
        listening = ["--host", "0.0.0.0", "--port", str(PORT), "--api-keys", f"{KEYS}/keys.toml", "--open-probes"]
        server["args"] = ["serve", self.model, *self.words, *listening]
        server["ports"] = [{"name": "http", "containerPort": PORT}]
        server["resources"] = self._resources()
        server["startupProbe"] = _probe("/ready", START_PERIOD, START_SECONDS // START_PERIOD)
        server["readinessProbe"] = _probe("/ready", 2, 2)
        server["livenessProbe"] = _probe("/health", 10, 3)
        # While this runs the pod is taken out of the service; then the server is told to end, and finishes.
        server["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(LEAVE_SECONDS)]}}}
        return server

    def _resources(self) -> JsonObject:
        options = self.options
        amounts: JsonObject = {"memory": options.memory}
        if options.cores is not None:
            amounts["cpu"] = str(options.cores)
        if options.chip != "cpu":
            amounts[RESOURCES[options.chip]] = str(options.devices)
        return {"requests": amounts, "limits": dict(amounts)}  # alike, so that cores are its own

    def _service(self) -> JsonObject:
        ports = [{"name": "http", "port": 80, "targetPort": "http"}]
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata_of(self.options),
            "spec": {"selector": self._selector, "ports": ports},
        }

    def _disruptions(self) -> JsonObject:
        return {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata_of(self.options),
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": self._selector}},
        }


def _as_yaml(content: JsonObject) -> str:
    """Return an object as YAML, in which what is there twice is written twice."""
    import yaml

    class PlainDumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    text: str = yaml.dump(content, Dumper=PlainDumper, sort_keys=False, default_flow_style=False, width=120)
    return text


def _probe(path: str, seconds: int, failures: int) -> JsonObject:
    get = {"path": path, "port": "http"}
    return {"httpGet": get, "periodSeconds": seconds, "timeoutSeconds": 2, "failureThreshold": failures}


def _pod_security() -> JsonObject:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
