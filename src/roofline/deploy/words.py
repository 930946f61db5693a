"""The command line of a replica, from the options that a fleet was started with."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from roofline.common.errors import ConfigError
from roofline.common.options import Options, declared
from roofline.server.options import ServeOptions, is_loopback

# Options that are the proxy's, or the supervisor's, and never a replica's; the key is in the environment.
NOT_PASSED = ("host", "port", "api_key", "tls_certificate", "tls_key", "drain_seconds", "data_parallel")
REFUSED = {  # by field of ServeOptions: why a fleet cannot have it
    "data_parallel": "a fleet has processes in its place: give --replicas N",
    "uds": "the proxy reaches servers at ports of 127.0.0.1",
    "uds_mode": "the proxy reaches servers at ports of 127.0.0.1",
    "response_store": "a response is kept by the server that made it, and the next request may reach another one",
    "max_stored_responses": "a response is kept by the server that made it, and the next request may reach another one",
    "batch_folder": "files are kept by one server, and the next request may reach another one; `roofline serve` has it",
}


def check_passable(options: ServeOptions) -> None:
    """Raise ConfigError for an option that a server behind a proxy with others beside it cannot have."""
    for name, reason in REFUSED.items():
        if name in options.changes():
            raise ConfigError(f"{name} cannot be used in a fleet: {reason}")


def flag_words(options: Options, without: Collection[str] = ()) -> Iterator[str]:
    """Yield the words of a command line that set the options whose values are not the defaults."""
    about = declared(type(options))
    for name, value in options.changes().items():
        if name in without:
            continue
        assert about[name].command_line, f"{name} has no flag"
        assert not about[name].secret, f"{name} may not be seen by other users"
        on, off = next(about[name].flag_pairs())
        if isinstance(value, bool):
            yield on if value else off
            continue
        for element in value if isinstance(value, list) else [value]:
            yield f"{on}={element}"


def serve_words(options: ServeOptions, number: int, drain_seconds: int, host: str = "127.0.0.1") -> list[str]:
    """Return what stands behind `roofline serve` for the replica of a number. Files that only one process can write
    have the number behind their names. Stored responses are off: the next request may reach another replica.

    host: address of the proxy. A replica that other machines reach through it must not take them for this machine's
    user, which it does of whoever comes by a loopback address without a key.
    """
    file, folder = options.engine.cache_file, options.engine.record
    engine = replace(
        options.engine,
        cache_file=None if file is None else f"{file}.{number}",
        record=None if folder is None else f"{folder}/{number}",
    )
    draft = [] if options.draft is None else [f"--draft={options.draft}"]
    words = [*flag_words(options, NOT_PASSED), *flag_words(options.load), *flag_words(engine), *draft]
    words += [] if is_loopback(host) else [f"--host={host}"]
    return [*words, "--max-stored-responses=0", f"--drain-seconds={drain_seconds}", "--", options.model]
