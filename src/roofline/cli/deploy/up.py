"""roofline up: several servers of a model behind one address."""

import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.backends.options import DEFAULT_MODEL, LoadOptions
from roofline.cli.options import Draft, ModelArgument
from roofline.cli.parser import Without, reads_option_file, understands
from roofline.common.options import Options, option
from roofline.deploy.options import FleetOptions
from roofline.deploy.scaling import ScalingTargets
from roofline.deploy.words import REFUSED
from roofline.engine.config import EngineConfig
from roofline.engine.keywords import own_words
from roofline.server.options import ServeOptions, is_loopback

if TYPE_CHECKING:
    from roofline.deploy.supervisor.setup import FleetSetup

KEY_VARIABLE = "ROOFLINE_API_KEY"
LOOK_SECONDS = 0.1  # between two looks at a fleet that is being started


@dataclass(frozen=True)
class StartOptions(Options):
    """How the command goes about it."""

    print_: bool = option(False, "Print the configuration of HAProxy, and start nothing.", flags=("--print",))
    detach: bool = option(False, "Return once the first server is ready, and leave the fleet running.")


def fleet_words(words: Sequence[str], flags: Container[str]) -> list[str]:
    """Return the words as this program has them. Raises ValueError for options of `serve` that a fleet cannot have."""
    for word in words:
        flag = word.partition("=")[0]
        name = "data_parallel" if flag == "--dp" else flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in REFUSED:
            raise ValueError(f"{flag} cannot be used in a fleet: {REFUSED[name]}")
    return own_words(words, flags)


@reads_option_file
@understands(fleet_words)
def command(
    fleet: FleetOptions,
    options: Annotated[ServeOptions, Without(*REFUSED, "batch_at_once", "max_stored_bytes", "stored_response_days")],
    load: LoadOptions,
    engine: EngineConfig,
    scaling: Annotated[ScalingTargets, Without("max_replicas")],
    model: ModelArgument = DEFAULT_MODEL,
    draft: Draft = None,
    start: StartOptions = StartOptions(),
) -> int:
    """Serve a model by several processes behind one address: each with its cores or devices, restarted when it ends,
    behind HAProxy on port 9080. The options of `roofline serve` are those of each process."""
    from roofline.common import env, log
    from roofline.common.processes import hide_argument
    from roofline.deploy.haproxy.router import find_haproxy
    from roofline.deploy.supervisor.setup import set_up_fleet
    from roofline.server.places import check_places

    env.quiet_numpy()
    key = options.api_key if options.api_key is not None else env.read(KEY_VARIABLE)
    if key is not None:
        hide_argument(key)
    serve = replace(options, model=absolute_model(model), draft=draft, load=load, engine=engine, api_key=key)
    setup = set_up_fleet(fleet, serve, scaling)
    if start.print_:
        print(_configuration(setup), end="")
        return 0
    find_haproxy()  # before a model is fetched
    check_places(serve)
    if start.detach:
        return _detached(setup, [word for word in sys.argv[1:] if word != "--detach"])
    if setup.key is None and not is_loopback(fleet.host):
        log.get("deploy").warning("%s can be reached from other machines and there is no --api-key", fleet.host)
    env.forget(KEY_VARIABLE)  # of the processes it starts, those of HAProxy need none
    for name in filter(None, (serve.model, draft)):
        prepare_replica(name, setup)
    _run(setup)
    return 0


def absolute_model(model: str) -> str:
    """Return a path as every process finds it, wherever it was started; a name as it is."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def prepare_replica(model: str, setup: "FleetSetup") -> None:
    """Pull the model, and measure the roofs of what the first replica has, where that was never done."""
    from roofline.cli.run.prepare import prepare
    from roofline.deploy.places import replica_places
    from roofline.hardware.cores import pinned_to

    load, cores = replica_places(setup.serve.load, setup.max_count)[0]
    with pinned_to(cores):
        prepare(model, load.threads, load.isa, load.backend)


def _run(setup: "FleetSetup") -> None:
    import asyncio

    from roofline.common.processes import allow_all_files, signal_handlers_as_before
    from roofline.deploy.supervisor.folder import FleetFolder
    from roofline.deploy.supervisor.supervisor import FleetSupervisor

    allow_all_files()  # HAProxy and the replicas inherit the limit
    with signal_handlers_as_before():
        asyncio.run(FleetSupervisor(setup, FleetFolder(setup.options.name)).run())


def _configuration(setup: "FleetSetup") -> str:
    """The configuration with addresses in place of inherited sockets, and without the key."""
    from roofline.deploy.haproxy.config import ProxyServer, haproxy_configuration
    from roofline.deploy.haproxy.router import most_connections
    from roofline.deploy.supervisor.folder import FleetFolder
    from roofline.deploy.supervisor.setup import LOOPBACK

    options, folder = setup.options, FleetFolder(setup.options.name).path
    servers = tuple(
        ProxyServer(f"r{at + 1}", LOOPBACK, options.replica_port + at, at < setup.replicas)
        for at in range(setup.max_count)
    )
    certificate = None if options.tls_certificate is None else folder / "proxy.pem"
    statistics = f"{LOOPBACK}:{options.statistics_port}"
    address, metrics = f"{options.host}:{options.port}", options.metrics_port
    about = setup.proxy(servers, address, statistics, certificate, most_connections(), metrics)
    key = None if about.check_key is None else KEY_VARIABLE
    return haproxy_configuration(replace(about, check_key=key, runtime_socket=folder / "haproxy.sock"))


def _detached(setup: "FleetSetup", words: list[str]) -> int:
    """Start the fleet in a session of its own, and wait until its first server is ready; the exit status."""
    import os
    import subprocess
    import time

    from roofline.deploy.children import log_tail
    from roofline.deploy.supervisor.folder import FleetFolder

    folder = FleetFolder(setup.options.name)
    folder.check_free()
    log = folder.path / "fleet.log"
    variables = {**os.environ, **({} if setup.serve.api_key is None else {KEY_VARIABLE: setup.serve.api_key})}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "roofline", *words],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    while process.poll() is None:
        state = folder.read_state()
        if state.get("pid") == process.pid and any(replica["state"] == "ready" for replica in state["replicas"]):
            print(f"{state['address']} (process {process.pid}, log {log}); `roofline down` ends it")
            return 0
        time.sleep(LOOK_SECONDS)
    print(log_tail(log), file=sys.stderr)
    return 1
