"""roofline keys: keys of clients of the server."""

from typing import Annotated

from roofline.cli.parser import Argument
from roofline.common.options import Option


def new(
    name: Annotated[str, Argument("Whose key it is, in log lines and metrics.")],
    admin: Annotated[bool, Option("The key may also change the server.")] = False,
    metrics: Annotated[bool, Option("The key may read /metrics and /ready, and nothing else.")] = False,
) -> None:
    """Make a key: its entry for the file of --api-keys goes to standard output, the key itself to standard error.

    The entry has only a hash of the key: `roofline keys new alice >> keys.toml` shows the key, and stores it nowhere.
    """
    import sys

    from roofline.common.errors import ConfigError
    from roofline.server.keys import ADMIN, METRICS, USE, new_entry

    if admin and metrics:
        raise ConfigError("--admin and --metrics: a key for metrics may do nothing else; leave one of the two out")
    key, entry = new_entry(name, (METRICS,) if metrics else (USE, ADMIN) if admin else (USE,))
    print(entry)
    print(f"The key of {name}, which is stored nowhere: {key}", file=sys.stderr)
