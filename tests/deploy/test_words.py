"""The words of a replica's command line, read back by the parser of `roofline serve`."""

from dataclasses import replace
from pathlib import Path

import pytest

from roofline.backends.options import LoadOptions
from roofline.cli.parser import Parser
from roofline.cli.run.serve import command as serve_command
from roofline.common.errors import ConfigError, RooflineError
from roofline.common.options import Option, Options, declared
from roofline.deploy.options import FleetOptions
from roofline.deploy.supervisor.setup import set_up_fleet
from roofline.deploy.words import NOT_PASSED, REFUSED, check_passable, serve_words
from roofline.engine.config import EngineConfig
from roofline.server.listening import widest_host
from roofline.server.options import ServeOptions
from tests.command_line import call_roofline


def other_value(option: Option) -> object:
    """A value that is not the default."""
    if bool in option.kinds:
        return not option.default
    if option.kinds == (str,) or not option.kinds:
        texts = [text for text in option.allowed() or ("-a b", "b") if text != option.default]
        return texts[:2] if option.repeated else texts[0]
    kind = option.kinds[0]
    if kind is Path:
        return Path("some where")
    number = kind((option.minimum or 0) + 1)
    return number if number != option.default else kind(number + 1)


def changed(kind: type[Options]) -> list[tuple[str, object]]:
    passed = [option for option in declared(kind).values() if option.command_line and option.name not in NOT_PASSED]
    return [(option.name, other_value(option)) for option in passed if option.name not in REFUSED]


@pytest.mark.parametrize("kind", [ServeOptions, LoadOptions, EngineConfig])
def test_every_option_of_a_server_arrives(kind):
    """One by one, as some do not go together; a server refuses pairs that do not fit, wherever they come from."""
    parser = Parser("serve", serve_command)
    for name, value in changed(kind):
        try:
            group = kind(**{name: value})
        except RooflineError:  # it needs another one beside it
            continue
        serve = ServeOptions(model="-m", draft="d" if name == "draft" else None)
        serve = (
            group if kind is ServeOptions else replace(serve, **{"load" if kind is LoadOptions else "engine": group})
        )
        serve = replace(serve, model="-m")
        words = serve_words(serve, 3, 77)
        read = parser.parse(words)
        parts = {ServeOptions: "options", LoadOptions: "load", EngineConfig: "engine"}
        expected = f"{value}.3" if name == "cache_file" else f"{value}/3" if name == "record" else value
        assert getattr(read[parts[kind]], name) == expected, words
        assert (read["model"], read["options"].drain_seconds, read["options"].max_stored_responses) == ("-m", 77, 0)


def test_a_key_is_not_among_the_words():
    assert not any("secret" in word for word in serve_words(ServeOptions("m", api_key="secret"), 1, 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data_parallel", 2),
        ("uds", Path("x")),
        ("response_store", Path("x")),
        ("batch_folder", Path("x")),
        ("max_stored_responses", 1),
    ],
)
def test_what_a_fleet_cannot_have_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"{field} cannot be used in a fleet: "):
        check_passable(ServeOptions("m", **{field: value}))
    flag = f"--{field.replace('_', '-')}"
    result = call_roofline(["up", "m", flag, str(value)])
    assert result.exit_code == 2
    assert f"{flag} cannot be used in a fleet" in result.stderr


def test_a_replica_has_its_share_of_the_threads_and_the_name_that_requests_give():
    setup = set_up_fleet(FleetOptions(replicas=1, max_replicas=2), ServeOptions("m", load=LoadOptions(threads=8)))
    assert (setup.replicas, setup.max_count) == (1, 2)
    commands = setup.commands("other")
    assert len(commands) == 2
    for command in commands:
        assert {"--threads=4", "--served-model-name=m"} <= {*command.words}
        assert command.words[-1] == command.model == "other"
        assert dict(command.environment) == {}
    with pytest.raises(ConfigError, match="replicas=3 is more than max_replicas=2"):
        FleetOptions(replicas=3, max_replicas=2)


def test_a_file_of_keys_brings_a_key_for_the_checks():
    setup = set_up_fleet(FleetOptions(replicas=1), ServeOptions("m", api_keys=Path("keys.toml")))
    assert setup.key.startswith("rl-")
    assert setup.commands()[0].environment == {"ROOFLINE_API_KEY": setup.key}
    assert setup.key not in repr(setup) + repr(setup.commands())
    assert set_up_fleet(FleetOptions(replicas=1), ServeOptions("m", api_key="k")).key == "k"


def test_behind_an_open_address_nobody_is_taken_for_the_user_of_this_machine():
    for host, words in (("0.0.0.0", ["--host=0.0.0.0"]), ("127.0.0.1", []), ("localhost", []), ("::1", [])):
        setup = set_up_fleet(FleetOptions(replicas=1, host=host), ServeOptions("m"))
        assert [word for word in setup.commands()[0].words if word.startswith("--host")] == words
    # The replica's own socket is one of this machine alone; what its gate goes by is the address that is open.
    assert widest_host("0.0.0.0", "127.0.0.1") == "0.0.0.0"
    assert widest_host("127.0.0.1", "192.0.2.1") == "192.0.2.1"
    assert widest_host("127.0.0.1", "127.0.0.1") == "127.0.0.1"
