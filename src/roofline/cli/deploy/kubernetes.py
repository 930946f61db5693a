"""roofline deploy k8s: Kubernetes' objects of a fleet, on standard output."""

from typing import Annotated

from roofline.backends.options import DEFAULT_MODEL
from roofline.cli.deploy.files import OPTION_WORDS, check_free_words
from roofline.cli.options import ModelArgument
from roofline.cli.parser import Argument, Without
from roofline.deploy.kubernetes.options import KubernetesOptions
from roofline.deploy.scaling import ScalingTargets

LATENCY = ("waiting", "queue_seconds", "first_token_seconds", "token_seconds", "growth", "settle_seconds")


def command(
    options: KubernetesOptions,
    scaling: Annotated[ScalingTargets, Without(*LATENCY)],
    model: ModelArgument = DEFAULT_MODEL,
    words: Annotated[list[str] | None, Argument(OPTION_WORDS)] = None,
) -> None:
    """Print what `kubectl apply` makes a fleet of: pods behind a service, a volume that is filled once, probes, how few
    pods may be gone, and what changes their number with the load.

    roofline deploy k8s smollm2-135m --cores 4 --memory 4Gi --storage 2Gi -- --max-running 16 > fleet.yaml
    """
    from roofline.deploy.kubernetes.objects import KubernetesFleet

    reason = "the objects say where pods listen, and take keys from the secret --keys names"
    check_free_words(model, words or (), reason, ("api_keys",))
    print(KubernetesFleet(options=options, scaling=scaling, model=model, words=tuple(words or ())).text(), end="")
