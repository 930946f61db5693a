"""What a fleet is to be: how many servers, how each is started, what the proxy before them does."""

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

from roofline.common.errors import ConfigError
from roofline.deploy.haproxy.config import ProxyDescription, ProxyServer
from roofline.deploy.options import FleetOptions
from roofline.deploy.places import automatic_count, replica_places
from roofline.deploy.scaling import ScalingTargets
from roofline.deploy.supervisor.replica import SERVE_WORDS, ReplicaCommand
from roofline.deploy.words import check_passable, serve_words
from roofline.server.options import ServeOptions

LOOPBACK = "127.0.0.1"  # which replicas listen on: only the proxy is reached from outside


@dataclass(frozen=True, kw_only=True)
class FleetSetup:
    """A fleet as it is started. serve: options of each server, with its model; key: that the proxy and the supervisor
    ask servers with, None where they need none; replicas: how many run at first, max_count: at most; scaling: what the
    load is held to, None where it does not say how many run; slots: requests that one server computes at a time, where
    it does."""

    options: FleetOptions
    serve: ServeOptions
    replicas: int
    max_count: int
    key: str | None = field(default=None, repr=False)
    scaling: ScalingTargets | None = None
    slots: int = 0

    @property
    def served_name(self) -> str:
        """The first of the names that requests give, whichever model answers to them."""
        return self.serve.names[0]

    def commands(self, model: str | None = None) -> list[ReplicaCommand]:
        """Return how each replica that there may be is started. model: in place of the setup's, under the same name."""
        serve = replace(self.serve, model=model or self.serve.model, served_model_name=list(self.serve.names))
        environment = {} if self.key is None else {"ROOFLINE_API_KEY": self.key}
        commands = []
        for number, (load, cores) in enumerate(replica_places(serve.load, self.max_count), 1):
            words = serve_words(replace(serve, load=load), number, self.options.drain_seconds, self.options.host)
            commands.append(
                ReplicaCommand(
                    words=[*SERVE_WORDS, *words], model=serve.model, environment=environment, cores=tuple(cores)
                )
            )
        return commands

    def proxy(
        self,
        servers: tuple[ProxyServer, ...],
        bind: str,
        statistics_bind: str,
        certificate: Path | None,
        connections: int,
        metrics_port: int,
    ) -> ProxyDescription:
        """Return what the proxy is to do. connections: that it may have open."""
        return ProxyDescription(
            bind=bind,
            statistics_bind=statistics_bind,
            runtime_socket=Path("haproxy.sock"),
            servers=servers,
            balance=self.options.balance,
            certificate=certificate,
            check_key=self.key,
            answer_seconds=self.serve.request_timeout,
            drain_seconds=self.options.drain_seconds,
            connections=connections,
            metrics=f"{LOOPBACK}:{metrics_port}",
        )


def set_up_fleet(options: FleetOptions, serve: ServeOptions, scaling: ScalingTargets | None = None) -> FleetSetup:
    """Return how a fleet is to be. Raises ConfigError for options of servers that a fleet cannot have and for targets
    of scaling without it, CapacityError for more replicas than there are cores or devices.

    Where only a file of keys is given, servers know a further key, made here, that health is asked with.
    """
    check_passable(serve)
    scaling = scaling or ScalingTargets()
    count = automatic_count(serve.load) if options.replicas == "auto" else options.replicas
    if options.max_replicas is not None:
        count = min(count, options.max_replicas)
    max_count = max(count, options.max_replicas or 1)
    key = serve.api_key
    if key is None and serve.api_keys is not None:
        key = f"rl-{secrets.token_urlsafe(32)}"
    slots = _checked_slots(options, serve, scaling, max_count)
    setup = FleetSetup(
        options=options,
        serve=serve,
        replicas=max(count, scaling.min_replicas),
        max_count=max_count,
        key=key,
        scaling=replace(scaling, max_replicas=max_count) if options.autoscale else None,
        slots=slots,
    )
    replica_places(serve.load, setup.max_count)
    return setup


def _checked_slots(options: FleetOptions, serve: ServeOptions, scaling: ScalingTargets, max_count: int) -> int:
    """Return how many requests one server computes at a time, 0 for a fleet that is not scaled. Raises ConfigError for
    options that need each other."""
    named = [*scaling.changes(), *(["requests_per_replica"] if options.requests_per_replica is not None else [])]
    if not options.autoscale:
        if named:
            raise ConfigError(f"{named[0]} is about a fleet that its load scales: give --autoscale too")
        return 0
    slots = options.requests_per_replica or serve.engine.max_running
    if slots is None:
        raise ConfigError(
            "--autoscale has to know how many requests one server computes at a time: give requests_per_replica, or "
            "max_running"
        )
    if scaling.min_replicas > max_count:
        raise ConfigError(f"min_replicas={scaling.min_replicas} is more than {max_count}: raise max_replicas")
    return slots
