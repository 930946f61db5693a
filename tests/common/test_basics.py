"""Errors, environment variables, units, log."""

import logging
import pickle
import re
from pathlib import Path

import pytest

import roofline
from roofline.common import env, log, units
from roofline.common.errors import CapacityError, ConfigError, RequestError, RooflineError, UnsupportedError

PACKAGE = Path(roofline.__file__).parent
ROOT = Path(__file__).parents[2]
READS_ENVIRONMENT = r"getenv|environb?(\[|\.get|\.pop|\.setdefault)| in os\.environ"


def test_errors_carry_cause_and_remedy():
    unsupported = UnsupportedError("format Q9", "there is no such format", ["Q4_1", "Q8_0"])
    assert str(unsupported) == "format Q9 is not supported: there is no such format. Use instead: Q4_1, Q8_0."
    assert str(UnsupportedError("a", "b")) == "a is not supported: b."
    capacity = CapacityError("A prompt", 1500, 1000, "tokens", "Shorten it.")
    assert str(capacity) == "A prompt needs 1,500 tokens, 1,000 are available. Shorten it."
    request = RequestError(400, "invalid_value", "n: 0 is too few", param="n")
    assert (request.status, request.code, request.param) == (400, "invalid_value", "n")
    for error in (unsupported, capacity, request, ConfigError("x")):
        assert isinstance(error, RooflineError)


def test_variables_are_checked(monkeypatch):
    monkeypatch.setenv("ROOFLINE_ISA", "AVX2")
    assert env.read("ROOFLINE_ISA") == "avx2"
    monkeypatch.setenv("ROOFLINE_ISA", "mmx")
    with pytest.raises(ConfigError, match="ROOFLINE_ISA='mmx' is not one of portable"):
        env.read("ROOFLINE_ISA")
    for bad in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv("ROOFLINE_THREADS", bad)
        with pytest.raises(ConfigError, match="ROOFLINE_THREADS"):
            env.threads()
    monkeypatch.setenv("ROOFLINE_THREADS", "3")
    assert env.threads() == 3
    monkeypatch.delenv("ROOFLINE_THREADS")
    assert env.threads() is None


def test_home(monkeypatch, tmp_path):
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))
    assert env.home() == tmp_path
    monkeypatch.setenv("ROOFLINE_HOME", "~/somewhere")
    assert env.home() == Path.home() / "somewhere"
    monkeypatch.delenv("ROOFLINE_HOME")
    assert env.home() == Path.home() / ".cache" / "roofline"


def test_a_secret_is_never_shown(monkeypatch):
    monkeypatch.setenv("ROOFLINE_API_KEY", "s3cret")
    monkeypatch.setenv("ROOFLINE_LOG", "debug")
    assert env.read("ROOFLINE_API_KEY") == "s3cret"
    assert env.printable_values()["ROOFLINE_LOG"] == "debug"
    assert "s3cret" not in str(env.printable_values())
    assert env.printable_values()["ROOFLINE_API_KEY"]
    monkeypatch.delenv("ROOFLINE_API_KEY")
    assert env.printable_values()["ROOFLINE_API_KEY"] is None


def test_only_env_reads_the_environment():
    """Handing the environment on to a child is fine; looking into it is not."""
    for path in PACKAGE.rglob("*.py"):
        if path != PACKAGE / "common" / "env.py":
            assert not re.search(r"getenv|environb?(\[|\.get|\.pop|\.setdefault)| in os\.environ", path.read_text()), (
                path
            )


def test_every_variable_is_listed_and_documented():
    known = {variable.name for variable in env.VARIABLES}
    used = set()
    for path in (*PACKAGE.rglob("*.py"), *(ROOT / "native").rglob("*.*")):
        used |= set(re.findall(r"[\"'](ROOFLINE_[A-Z_]+)[\"']", path.read_text()))
    assert used <= known
    documented = set(re.findall(r"`(ROOFLINE_[A-Z_]+)`", (ROOT / "docs" / "reference" / "environment.md").read_text()))
    assert known == documented


def test_units():
    assert units.human_bytes(0) == "0 B"
    assert units.human_bytes(1536) == "1.5 KiB"
    assert units.human_bytes(98362432) == "93.8 MiB"
    assert units.human_bytes(5 << 40) == "5.0 TiB"
    assert units.human_rate(6.1e10, "B") == "61.0 GB/s"
    assert units.human_rate(2.1e12, "op") == "2.1 Top/s"
    assert units.human_seconds(5e-5) == "50 us"
    assert units.human_seconds(0.00123) == "1.23 ms"
    assert units.human_seconds(12.34) == "12.3 s"
    assert units.human_seconds(754) == "13 min"
    assert units.human_seconds(40000) == "11 h"


def test_log_goes_to_stderr_at_the_asked_level(monkeypatch, capsys):
    logger = logging.getLogger("roofline")
    before = (logger.handlers[:], logger.level, logger.propagate)
    monkeypatch.setenv("ROOFLINE_LOG", "info")
    try:
        log.configure()
        log.get("engine").info("an %s", "automatic choice")
        log.get("engine").debug("detail")
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    captured = capsys.readouterr()
    assert "INFO roofline.engine: an automatic choice" in captured.err
    assert "detail" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("text", "size"), [(5, 5), ("20gb", 20 * 10**9), ("1.5 GiB", 3 << 29), ("7", 7), ("1kb", 1000)]
)
def test_bytes_are_read_as_people_write_them(text, size):
    assert units.parse_bytes("limit", text) == size


@pytest.mark.parametrize("text", ["", "gb", "-1", "1 zb", "1e9gb x", "0", 0, "0.1b"])
def test_what_is_no_number_of_bytes_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="limit"):
        units.parse_bytes("limit", text)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a field"),
        UnsupportedError("a thing", "no chip has it", ("another",)),
        CapacityError("a model", 3, 2, "bytes", "Take less."),
        RequestError(400, "invalid_value", "too long", "prompt"),
    ],
)
def test_errors_cross_to_other_processes_whole(error):
    """Those that a process pool cannot bring back end it, and nobody reads why."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))
