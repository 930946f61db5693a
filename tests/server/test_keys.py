"""Keys of a server: read from their file, compared in constant time, read again, and shown nowhere."""

import hashlib
import hmac
import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from roofline.common.errors import ConfigError
from roofline.server import keys as module
from roofline.server.keys import (
    ADMIN,
    ANYBODY,
    LOCAL,
    METRICS,
    NOBODY,
    SINGLE,
    USE,
    Keys,
    Principal,
    digest_of,
    new_entry,
    read_keys,
)
from roofline.server.options import ServeOptions
from tests.command_line import call_roofline

SECRET = "rl-a-key-that-nobody-should-see"
ALICE = f'[[keys]]\nname = "alice"\nkey = "{SECRET}"\n'
BOB_KEY = b"rl-bob"
BOB = f"""
[[keys]]
name = "bob"
sha256 = "{hashlib.sha256(BOB_KEY).hexdigest()}"
scopes = ["use", "admin"]
streams = 3
priority = -7
weight = 2.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(ALICE + BOB)
    return path


def test_a_file_says_what_each_key_may_do(file):
    keys = Keys(file=file)
    alice, bob = keys.identify(SECRET.encode()), keys.identify(BOB_KEY)
    assert alice is not None
    assert bob is not None
    assert (alice.name, alice.scopes, alice.streams, alice.priority, alice.weight) == ("alice", {USE}, None, 0, 1.0)
    assert (bob.name, bob.scopes, bob.streams, bob.priority, bob.weight) == ("bob", {USE, ADMIN}, 3, -7, 2.5)
    assert keys.required
    assert [keys.identify(key) for key in (b"", b"rl-bo", b"rl-bobs", b"alice", digest_of(BOB_KEY))] == [None] * 5


def test_a_single_key_administers_nothing_and_stands_beside_those_of_a_file(file):
    keys = Keys("single", file)
    principal = keys.identify(b"single")
    assert principal is not None
    assert (principal.name, principal.scopes) == ("default", {USE})
    assert keys.identify(BOB_KEY) is not None
    assert len(keys) == 3
    assert not Keys().required
    assert Keys().identify(b"") is None


def test_every_key_is_compared_whichever_it_is(file, monkeypatch):
    compared = []

    def compare(known: bytes, digest: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(known, digest)

    keys = Keys("single", file)
    monkeypatch.setattr(module, "hmac", type("Hmac", (), {"compare_digest": staticmethod(compare)}))
    for key in (b"single", SECRET.encode(), BOB_KEY, b"none of them", b"x" * 10_000):
        compared.clear()
        keys.identify(key)
        assert len(compared) == 3
        assert {len(known) for known in compared} == {32}  # hashes, whose lengths tell nothing


def test_salts_differ_by_key_and_stay_when_a_key_is_renamed(file):
    salts = {principal.salt for principal in read_keys(file).values()}
    assert len(salts) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", salt) for salt in salts)
    assert not salts & {digest_of(BOB_KEY).hex()[:32], digest_of(SECRET.encode()).hex()[:32]}
    file.write_text((ALICE + BOB).replace("alice", "carol").replace("bob", "dave"))
    assert {principal.salt for principal in read_keys(file).values()} == salts


WRONG = {
    "keys = 5": "keys: is the number 5, not a list",
    "": "keys: has 0 entries, and 1 to 1000 are needed",
    "[[keys]]": "keys[0].name: is missing",
    '[[keys]]\nname = "a b"\nkey = "k"': "keys[0].name: is not 1 to 64 letters",
    '[[keys]]\nname = "a"': "keys[0].key: one of key and sha256 is needed",
    '[[keys]]\nname = "a"\nkey = "k"\nsha256 = "0"': "keys[0].key: one of key and sha256 is needed",
    f'[[keys]]\nname = "a"\nsha256 = "{SECRET}"': "keys[0].sha256: is not 64 hexadecimal digits",
    f'[[keys]]\nname = "a"\nkey = "{SECRET} "': "keys[0].key: is not 1 to 1024 visible ASCII characters",
    f'[[keys]]\nname = "a"\nkey = ["{SECRET}"]': "keys[0].key: is not 1 to 1024 visible ASCII characters",
    '[[keys]]\nname = "a"\nkey = "k"\nscopes = ["root"]': "keys[0].scopes: are not among 'use', 'admin', 'metrics'",
    '[[keys]]\nname = "a"\nkey = "k"\nstreams = 0': "keys[0].streams: is less than 1",
    '[[keys]]\nname = "a"\nkey = "k"\npriority = -1001': "keys[0].priority: is not within -1000 and 1000",
    '[[keys]]\nname = "a"\nkey = "k"\nweight = 0': "keys[0].weight: is not within 0.001 and 1000",
    '[[keys]]\nname = "a"\nkey = "k"\nweight = nan': "keys[0].weight: is the number nan, not a finite number",
    f'[[keys]]\nname = "a"\nkey = "k"\n"{SECRET}" = 1': "keys[0].: has a field other than name, key",
    f"{SECRET} = 1": "the file: has a field other than keys",
    SECRET: "is not TOML (at end of document)",
    f"{ALICE}{ALICE}": "keys[1].name: 'alice' or its key is there twice",
    f"{ALICE}{ALICE.replace('alice', 'bob')}": "keys[1].name: 'bob' or its key is there twice",
    f"{ALICE}{ALICE.replace('rl-a', 'rl-b')}": "keys[1].name: 'alice' or its key is there twice",
    f"{ALICE}{SECRET} '{SECRET}'\n": "is not TOML (at line 4, column ",
    "\udcff": "is not UTF-8",
    "a=" + "[" * 5000: "is nested too deep",
    "a=" + "9" * 5000: "has a value that cannot be read",
}


@pytest.mark.parametrize("content", WRONG, ids=lambda content: WRONG[content][:40])
def test_a_file_that_cannot_be_used_is_refused_without_its_keys(file, content):
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=re.escape(f"{file}: {WRONG[content]}")) as refused:
        Keys(file=file)
    assert SECRET not in str(refused.value)


# field of an entry: (values at the bounds, values beyond them)
BOUNDS = {
    "streams": ((1, 2), (0, -1)),
    "priority": ((-1000, 1000), (-1001, 1001)),
    "weight": ((0.001, 0.0015, 1000.0), (0.0009999, 1000.0001, 1001.0)),
}


@pytest.mark.parametrize("field", BOUNDS)
def test_the_numbers_of_an_entry_are_bounded_on_either_side(file, field):
    within, beyond = BOUNDS[field]
    for value in within:
        file.write_text(f"{ALICE}{field} = {value}\n")
        (alice,) = read_keys(file).values()
        assert getattr(alice, field) == value
    for value in beyond:
        file.write_text(f"{ALICE}{field} = {value}\n")
        with pytest.raises(ConfigError, match=rf"keys\[0\]\.{field}: is "):
            read_keys(file)


def test_names_and_keys_are_bounded_in_length(file):
    for name, key in (("a" * 64, "k" * 1024), ("0", "!")):
        file.write_text(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n')
        assert {digest: each.name for digest, each in read_keys(file).items()} == {digest_of(key.encode()): name}
    for name, key, problem in (
        ("a" * 65, "k", "name: is not 1 to 64 letters"),
        ("", "k", "name: is not 1 to 64 letters"),
        ("-a", "k", "name: is not 1 to 64 letters"),
        ("a", "k" * 1025, "key: is not 1 to 1024 visible"),
        ("a", "", "key: is not 1 to 1024 visible"),
    ):
        file.write_text(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n')
        with pytest.raises(ConfigError, match=re.escape(f"keys[0].{problem}")):
            read_keys(file)


def test_a_file_has_a_thousand_keys_and_a_mebibyte_at_most(file):
    def entries(count: int) -> str:
        return "".join(f'[[keys]]\nname = "k{i}"\nkey = "{i}"\n' for i in range(count))

    file.write_text(entries(1000))
    assert [each.name for each in read_keys(file).values()] == [f"k{i}" for i in range(1000)]
    file.write_text(entries(1001))
    with pytest.raises(ConfigError, match="keys: has 1001 entries, and 1 to 1000 are needed"):
        read_keys(file)
    file.write_text(ALICE + "#" * (1048576 - len(ALICE)))
    assert len(read_keys(file)) == 1
    file.write_text(ALICE + "#" * (1048577 - len(ALICE)))
    with pytest.raises(ConfigError, match="is larger than 1048576 bytes"):
        read_keys(file)


def test_a_key_is_looked_up_by_its_name(file):
    keys = Keys("single", file)
    assert [each and each.name for each in map(keys.named, ("alice", "bob", "default", "Bob"))] == [
        *("alice", "bob", "default", None),
    ]


def test_what_those_without_an_entry_of_a_file_may_do():
    """A name and scopes alone: nothing urgent, one share, the server's streams, and no batch's line."""
    plain = Principal("x", frozenset())
    assert (plain.salt, plain.streams, plain.priority, plain.weight, plain.background) == ("", None, 0, 1.0, False)
    allowed = {each.name: (each.scopes, each.streams, each.priority) for each in (LOCAL, ANYBODY, NOBODY, SINGLE)}
    assert allowed == {
        "local": ({USE, ADMIN}, sys.maxsize, -1000),
        "anybody": ({USE}, sys.maxsize, 0),
        "nobody": (set(), None, 0),
        "default": ({USE}, None, 0),
    }


def test_a_file_that_is_not_there_ends_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml: cannot be read: No such file"):
        Keys(file=tmp_path / "nothing.toml")


@pytest.mark.parametrize("entry", ['name = "default"\nkey = "k"', 'name = "other"\nkey = "single"'])
def test_a_file_does_not_repeat_the_single_key(file, entry):
    file.write_text(f"[[keys]]\n{entry}\n")
    with pytest.raises(ConfigError, match="has the name or the key of --api-key"):
        Keys("single", file)


def test_a_file_is_read_again_when_it_changed(file):
    keys = Keys("single", file)
    file.write_text(BOB)
    assert keys.identify(SECRET.encode()) is not None  # not before it is looked at
    keys.refresh()
    assert keys.identify(SECRET.encode()) is None
    assert keys.identify(BOB_KEY) is not None
    assert keys.identify(b"single") is not None


def test_a_broken_file_leaves_the_keys_and_says_so_once(file, caplog):
    keys = Keys(file=file)
    for content in ("broken", None):
        caplog.clear()
        file.unlink() if content is None else file.write_text(content)
        for _ in range(3):
            keys.refresh()
        assert keys.identify(BOB_KEY) is not None
        assert len(caplog.records) == 1
        assert caplog.records[0].getMessage().startswith(f"{file}: ")
        assert caplog.records[0].getMessage().endswith(". The keys that were read before stay.")
    file.write_text(ALICE)
    keys.refresh()
    assert keys.identify(BOB_KEY) is None


def test_a_refresh_by_force_reads_an_unchanged_file(file, caplog):
    caplog.set_level(logging.INFO, "roofline.server")
    keys = Keys("single", file)
    keys.refresh()
    assert not caplog.records
    keys.refresh(True)
    assert caplog.messages == [f"{file}: 2 keys"]


def test_nothing_shows_a_key(file, capsys):
    keys = Keys(SECRET + "-single", None)
    principal = keys.identify(f"{SECRET}-single".encode())
    options = ServeOptions(api_key=SECRET)
    for shown in (repr(keys), str(vars(keys)), repr(principal), repr(options), str(read_keys(file))):
        assert SECRET not in shown
    assert principal is not None
    assert principal.salt not in repr(principal)
    with pytest.raises(ConfigError) as refused:
        ServeOptions(api_key=f"{SECRET} two words")
    assert SECRET not in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        ServeOptions(api_key=7)  # type: ignore[arg-type]
    assert "7" not in str(refused.value)


def test_a_fresh_key_fits_its_entry(tmp_path):
    file = tmp_path / "keys.toml"
    made = [new_entry(name, scopes) for name, scopes in (("ann", (USE,)), ("root", (USE, ADMIN)), ("prom", (METRICS,)))]
    file.write_text("".join(entry for _, entry in made))
    keys = Keys(file=file)
    for (key, entry), name, scopes in zip(made, ("ann", "root", "prom"), ({USE}, {USE, ADMIN}, {METRICS}), strict=True):
        assert len(key) > 40
        assert key not in entry
        assert "sha256" in tomllib.loads(entry)["keys"][0]
        principal = keys.identify(key.encode())
        assert principal is not None
        assert (principal.name, principal.scopes) == (name, scopes)
    with pytest.raises(ConfigError, match="is not 1 to 64 letters"):
        new_entry('x"\n')


def test_a_key_on_the_command_line_is_overwritten_there():
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from roofline.common.processes import hide_argument\n"
        "hide_argument('s3cret')\n"
        "sys.stdout.write(Path('/proc/self/cmdline').read_text())\n"
    )
    words = ["--api-key", "s3cret", "--api-key=s3cret", "s3cret-model", "not=s3cret"]
    shown = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout
    assert shown.split("\0")[3:-1] == ["--api-key", "******", "--api-key=******", "s3cret-model", "not=s3cret"]


@pytest.mark.parametrize(
    ("words", "scopes"),
    [([], {USE}), (["--admin"], {USE, ADMIN}), (["--metrics"], {METRICS})],
    ids=["use", "admin", "metrics"],
)
def test_the_command_makes_keys_of_each_kind(tmp_path, words, scopes):
    made = call_roofline(["keys", "new", "prom", *words])
    file = tmp_path / "keys.toml"
    file.write_text(made.stdout)
    (principal,) = read_keys(file).values()
    assert (made.exit_code, principal.name, principal.scopes) == (0, "prom", scopes)
    refused = call_roofline(["keys", "new", "prom", "--admin", "--metrics"])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "--admin and --metrics: a key for metrics may do nothing else" in refused.stderr
