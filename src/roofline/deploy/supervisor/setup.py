"""What a fleet is to be: how many servers, how each is started, what the proxy before them does."""

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

from roofline.deploy.haproxy.config import ProxyDescription, ProxyServer
from roofline.deploy.options import FleetOptions
from roofline.deploy.places import automatic_count, replica_places
from roofline.deploy.supervisor.replica import SERVE_WORDS, ReplicaCommand
from roofline.deploy.words import check_passable, serve_words
from roofline.server.options import ServeOptions

LOOPBACK = "127.0.0.1"  # which replicas listen on: only the proxy is reached from outside


@dataclass(frozen=True, kw_only=True)
class FleetSetup:
    """A fleet as it is started. serve: options of each server, with its model; key: that the proxy and the supervisor
    ask servers with, None where they need none; replicas: how many run at first, max_count: at most."""

    options: FleetOptions
    serve: ServeOptions
    replicas: int
    max_count: int
    key: str | None = field(default=None, repr=False)

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
        )


def set_up_fleet(options: FleetOptions, serve: ServeOptions) -> FleetSetup:
    """Return how a fleet is to be. Raises ConfigError for options of servers that a fleet cannot have, CapacityError
    for more replicas than there are cores or devices.

    Where only a file of keys is given, servers know a further key, made here, that health is asked with.
    """
    check_passable(serve)
    count = automatic_count(serve.load) if options.replicas == "auto" else options.replicas
    if options.max_replicas is not None:
        count = min(count, options.max_replicas)
    key = serve.api_key
    if key is None and serve.api_keys is not None:
        key = f"rl-{secrets.token_urlsafe(32)}"
    setup = FleetSetup(
        options=options, serve=serve, replicas=count, max_count=max(count, options.max_replicas or 1), key=key
    )
    replica_places(serve.load, setup.max_count)
    return setup
