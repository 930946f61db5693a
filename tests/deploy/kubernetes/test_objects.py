"""Kubernetes' objects: its published schemas take them, and they say what the options say."""

from copy import deepcopy

import pytest
import yaml

from roofline.common.errors import ConfigError
from roofline.deploy.kubernetes.objects import KubernetesFleet
from roofline.deploy.kubernetes.options import KubernetesOptions
from roofline.deploy.scaling import FleetLoad, ScalingMemory, ScalingTargets, decide
from tests import judges
from tests.command_line import call_roofline

FIRST_MINOR = 30  # of version 1; all later ones too, as far as the judge has them
SIZES = {"cores": 4, "memory": "4Gi", "storage": "2Gi"}
SCALED = ["--requests-per-replica", "16", "--max-replicas", "8", "--min-replicas", "2", "--calm-seconds", "90"]
CALLS = {
    "cpu": ["smollm2-135m", "--cores", "4", "--memory", "4Gi", "--storage", "2Gi"],
    "cuda": [
        "hf:a/b",
        "--chip",
        "cuda",
        "--devices",
        "2",
        "--memory",
        "64Gi",
        "--storage",
        "200Gi",
        "--namespace",
        "n",
    ],
    "rocm": ["/models/tiny", "--chip", "rocm", "--memory", "16Gi", "--name", "tiny-one", "--keys", "k"],
    "hpa": ["m", "--cores", "4", "--memory", "4Gi", "--storage", "2Gi", "--autoscaler", "hpa", *SCALED],
    "keda": ["m", "--cores", "4", "--memory", "4Gi", "--storage", "2Gi", "--autoscaler", "keda", *SCALED],
}


def objects(call: list[str], *words: str) -> dict[str, dict]:
    """The objects that a call prints, by kind."""
    result = call_roofline(["deploy", "k8s", *call, "--", *words])
    assert result.exit_code == 0, result.stderr
    assert "&id" not in result.stdout, "YAML's references, which people cannot read"
    return {part["kind"]: part for part in yaml.safe_load_all(result.stdout) if part is not None}


def versions() -> list[str]:
    judge = judges.judge("kubernetes_validate.utils")
    return sorted({version for version in judge.all_versions() if int(version.split(".")[1]) >= FIRST_MINOR})


@pytest.mark.parametrize("name", CALLS)
def test_the_published_schemas_take_the_objects(name):
    judge = judges.judge("kubernetes_validate")
    made = objects(CALLS[name], "--max-running", "16")
    if (scaled := made.pop("ScaledObject", None)) is not None:  # KEDA's schema is in no package: its parts alone
        advanced = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        made["HorizontalPodAutoscaler"] = objects(CALLS["hpa"])["HorizontalPodAutoscaler"]
        made["HorizontalPodAutoscaler"]["spec"]["behavior"] = advanced
    assert versions()
    for content in made.values():
        for version in versions():
            judge.validate(content, version, strict=True)


def test_the_judge_refuses_what_is_wrong():
    judge = judges.judge("kubernetes_validate")
    made = objects(CALLS["hpa"])
    for kind, path in (
        ("Deployment", ("spec", "template", "spec", "containers", 0, "readinessProbe", "httpGets")),
        ("PersistentVolumeClaim", ("spec", "accessMode")),
        ("HorizontalPodAutoscaler", ("spec", "behavior", "scaleUps")),
    ):
        wrong = deepcopy(made[kind])
        inner = wrong
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = {}
        with pytest.raises(judge.ValidationError):
            judge.validate(wrong, versions()[-1], strict=True)


def test_a_pod_waits_for_the_volume_that_one_job_fills():
    made = objects(CALLS["cpu"], "--max-running", "16")
    job, pod = made["Job"]["spec"]["template"]["spec"], made["Deployment"]["spec"]["template"]["spec"]
    (filling,), (waiting,), (server,) = job["containers"], pod["initContainers"], pod["containers"]
    marks = [[entry["value"] for entry in part["env"] if entry["name"] == "MARK"] for part in (filling, waiting)]
    assert marks[0] == marks[1]
    assert made["Job"]["metadata"]["name"].endswith(marks[0][0])
    assert other_mark("other") != marks[0][0], "another model is another job"
    claim = {"claimName": "roofline-models"}
    assert all({"name": "models", "persistentVolumeClaim": claim} in part["volumes"] for part in (job, pod))
    (mount,) = (mount for mount in server["volumeMounts"] if mount["name"] == "models")
    assert mount["readOnly"]
    assert server["args"] == [
        *("serve", "smollm2-135m", "--max-running", "16", "--host", "0.0.0.0", "--port", "8000"),
        *("--api-keys", "/etc/roofline/keys/keys.toml", "--open-probes"),
    ]
    assert server["resources"]["limits"] == {"memory": "4Gi", "cpu": "4"}


def other_mark(model: str) -> str:
    return objects([model, *CALLS["cpu"][1:]])["Job"]["metadata"]["name"].rpartition("-")[2]


def test_a_model_in_the_image_needs_no_volume_and_gpus_are_asked_for_by_name():
    made = objects(CALLS["rocm"])
    assert set(made) == {"Deployment", "Service", "PodDisruptionBudget"}
    (server,) = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert server["resources"]["limits"] == {"memory": "16Gi", "amd.com/gpu": "1"}
    assert "initContainers" not in made["Deployment"]["spec"]["template"]["spec"]
    made = objects(CALLS["cuda"])
    (server,) = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert server["resources"]["requests"] == {"memory": "64Gi", "nvidia.com/gpu": "2"}
    assert {content["metadata"]["namespace"] for content in made.values()} == {"n"}


def test_selectors_find_the_pods_and_the_grace_is_that_of_the_server():
    made = objects(CALLS["cpu"], "--drain-seconds=100")
    template = made["Deployment"]["spec"]["template"]
    selectors = (
        made["Deployment"]["spec"]["selector"]["matchLabels"],
        made["Service"]["spec"]["selector"],
        made["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    )
    assert all(selector.items() <= template["metadata"]["labels"].items() for selector in selectors)
    assert not selectors[0].items() <= made["Job"]["spec"]["template"]["metadata"]["labels"].items()
    assert template["spec"]["terminationGracePeriodSeconds"] == 5 + 100 + 15


def test_autoscalers_have_the_policy_s_numbers():
    load = FleetLoad(seconds=0.0, up=2, slots=16, running=50)
    targets = ScalingTargets(min_replicas=2, max_replicas=8, queue_seconds=None)
    ours = decide(targets, load, ScalingMemory()).replicas
    horizontal = objects(CALLS["hpa"])["HorizontalPodAutoscaler"]["spec"]
    amount = horizontal["metrics"][0]["pods"]["target"]["averageValue"]
    # Kubernetes: the metric's sum over what each pod should have, rounded up.
    assert -(-50 * 1000 // int(amount.removesuffix("m"))) == ours == 5
    assert (horizontal["minReplicas"], horizontal["maxReplicas"]) == (2, 8)
    assert horizontal["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 90
    assert "replicas" not in objects(CALLS["hpa"])["Deployment"]["spec"]
    keda = objects(CALLS["keda"])["ScaledObject"]["spec"]
    assert -(-50 // float(keda["triggers"][0]["metadata"]["threshold"])) == ours
    assert keda["triggers"][0]["metadata"]["query"] == (
        'sum(vllm:num_requests_running{pod=~"m-.+"}) + sum(vllm:num_requests_waiting{pod=~"m-.+"})'.replace(
            "m-", "roofline-"
        )
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cores": None}, "cores is needed for chip=cpu"),
        ({"memory": None}, "memory is needed"),
        ({"memory": "4 GB"}, "memory='4 GB' is no amount"),
        ({"name": "A"}, "name='A' cannot be used"),
        ({"autoscaler": "hpa"}, "needs requests_per_replica"),
    ],
)
def test_options_that_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        KubernetesOptions(**{**SIZES, **changes})


def test_what_is_needed_for_other_options_is_said():
    options = KubernetesOptions(**{**SIZES, "storage": None})
    with pytest.raises(ConfigError, match="storage is needed"):
        KubernetesFleet(options=options, scaling=ScalingTargets(), model="name")
    fleet = KubernetesFleet(options=options, scaling=ScalingTargets(min_replicas=2), model="/models/m")
    with pytest.raises(ConfigError, match="min_replicas is about a number of pods that changes"):
        fleet.objects()
    for word in ("--host=::", "--port=1", "--api-key=k", "--uds=s", "--open-probes"):
        refused = call_roofline(["deploy", "k8s", *CALLS["cpu"], "--", word])
        assert (refused.exit_code, "the objects say where pods listen" in refused.stderr) == (1, True)
