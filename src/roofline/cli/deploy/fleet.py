"""roofline status, down, roll and scale: what is done with a fleet that runs."""

import sys
import time
from typing import Annotated

from roofline.cli.deploy.up import absolute_model
from roofline.cli.options import AsJson
from roofline.cli.parser import Argument
from roofline.common.json_types import JsonObject
from roofline.common.options import Option, declared
from roofline.deploy.options import MAX_REPLICAS, FleetOptions

Name = Annotated[str, declared(FleetOptions)["name"]]
WATCH_SECONDS = 1.0


def status(
    name: Name = "default",
    json: AsJson = False,
    watch: Annotated[bool, Option("Show it again each second, until Ctrl-C.")] = False,
) -> None:
    """Show a fleet that runs: its replicas, what they do, and what they have answered."""
    from roofline.cli.output import print_json
    from roofline.deploy.supervisor.control import send_command
    from roofline.deploy.supervisor.folder import FleetFolder

    folder = FleetFolder(name)
    while True:
        state = send_command(folder, {"command": "status"})
        if watch and sys.stdout.isatty():
            print("\033[H\033[2J", end="")
        if json:
            print_json(state)
        else:
            _print_status(state)
        if not watch:
            return
        sys.stdout.flush()
        time.sleep(WATCH_SECONDS)


def down(
    name: Name = "default",
    now: Annotated[bool, Option("End open answers at once, in place of letting them finish.")] = False,
) -> None:
    """End a fleet that runs: it takes no more requests, and those that are open finish, in its --drain-seconds."""
    from roofline.deploy.supervisor.control import send_command
    from roofline.deploy.supervisor.folder import FleetFolder

    folder = FleetFolder(name)
    send_command(folder, {"command": "down", "now": now})
    while folder.is_running():
        time.sleep(0.05)


def roll(
    model: Annotated[str | None, Argument("The model to change to. Default: the one that is served.")] = None,
    name: Name = "default",
) -> None:
    """Replace the servers of a fleet, one after the other and without a failed request: by new ones, or by those of
    another model, which answers under the same name."""
    from roofline.cli.run.prepare import pull
    from roofline.deploy.supervisor.control import send_command
    from roofline.deploy.supervisor.folder import FleetFolder

    if model is not None:
        model = absolute_model(model)
        pull(model)
    send_command(FleetFolder(name), {"command": "roll", "model": model}, lambda line: print(line, flush=True))


def scale(
    replicas: Annotated[int, Argument(f"How many servers are to run, from 1 to {MAX_REPLICAS}.")],
    name: Name = "default",
) -> None:
    """Have more or fewer servers of a fleet run, up to its --max-replicas. Those that leave finish what they have."""
    from roofline.deploy.supervisor.control import send_command
    from roofline.deploy.supervisor.folder import FleetFolder

    send_command(FleetFolder(name), {"command": "scale", "replicas": replicas})


def _print_status(state: JsonObject) -> None:
    from roofline.cli.output import console, plain_table

    shown = [replica for replica in state["replicas"] if replica["state"] != "absent"]
    ready = sum(replica["state"] == "ready" for replica in shown)
    ending = ", ending" if state["stopping"] else ""
    print(f"{state['name']}: {state['served_name']} on {state['address']}, {ready} of {state['wanted']} ready{ending}")
    print(f"balance {state['balance']}, statistics {state['statistics']}, logs {state['folder']}")
    print(f"metrics {state['metrics']}, and {state['address']}/metrics")
    if state["scaling"] is not None:
        print(f"scaled to {state['scaling']['replicas']}: {state['scaling']['reason']}")
    headings = ("", "state", "proxy", "port", "pid", "restarts", "running", "waiting", "served", "tokens/s", "model")
    console().print(plain_table(headings, [_row(replica) for replica in shown]))


def _row(replica: JsonObject) -> list[str]:
    figures = replica["figures"] or {}
    counts = [str(figures.get(name, "-")) for name in ("running", "waiting", "served", "tokens_per_second")]
    pid = "-" if replica["pid"] is None else str(replica["pid"])
    leaving = f" +{len(replica['draining'])} draining" if replica["draining"] else ""
    state = f"{replica['state']}{leaving}"
    return [
        replica["name"],
        state,
        replica["proxy"] or "-",
        str(replica["port"]),
        pid,
        str(replica["restarts"]),
        *counts,
        replica["model"],
    ]
