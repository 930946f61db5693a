"""hf: sources through the real huggingface_hub, against a hub of our own on the loopback."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="it is what talks to the hub")

REVISION = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "model.safetensors": bytes(range(256)) * 100_000,  # 26 MB: the client writes pieces of 10
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"code",
}


class Hub(BaseHTTPRequestHandler):
    """The few routes a download takes. `gets` counts bodies; `cut` ends the next large body early, once."""

    gets: list[tuple[str, str | None]]
    cut: list[bool]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/repo/tree/"):
            entries = [{"type": "file", "path": n, **_facts(n), "oid": _facts(n)["blobId"]} for n in FILES]
            self._send(json.dumps(entries).encode(), {"Content-Type": "application/json"})
        elif path.startswith("/api/models/org/repo"):
            siblings = [{"rfilename": name, **_facts(name)} for name in FILES]
            info = {"id": "org/repo", "sha": REVISION, "siblings": siblings, "cardData": {"license": "mit"}}
            self._send(json.dumps(info).encode(), {"Content-Type": "application/json"})
        elif path.startswith(f"/org/repo/resolve/{REVISION}/") and path.rpartition("/")[2] in FILES:
            name = path.rpartition("/")[2]
            if self.command == "GET":
                self.gets.append((name, self.headers.get("Range")))
            etag = hashlib.sha256(FILES[name]).hexdigest()
            self._send(FILES[name], {"X-Repo-Commit": REVISION, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"})
        else:
            self.send_error(404)

    def _send(self, body: bytes, headers: dict[str, str]) -> None:
        begin = 0
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            begin = int(wanted.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if wanted else 200)
        for key, content in headers.items():
            self.send_header(key, content)
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.cut and len(body) > 1_000_000:
            self.cut.pop()
            self.wfile.write(body[begin : len(body) // 2])
            self.close_connection = True
            return
        self.wfile.write(body[begin:])

    def log_message(self, *arguments: object) -> None:
        """Nothing: the tests' output is not a web server's log."""


def _facts(name: str) -> dict[str, object]:
    facts: dict[str, object] = {"size": len(FILES[name]), "blobId": hashlib.sha1(FILES[name]).hexdigest()}
    if name.endswith(".safetensors"):
        digest = hashlib.sha256(FILES[name]).hexdigest()
        facts["lfs"] = {"sha256": digest, "oid": digest, "size": len(FILES[name]), "pointerSize": 100}
    return facts


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.gets, Hub.cut = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def _pull(hub: ThreadingHTTPServer, home: Path, name: str) -> subprocess.CompletedProcess:
    """Pull in a fresh process: huggingface_hub reads its endpoint when it is imported."""
    code = f"from roofline.weights import sources; print(sources.pull({name!r}))"
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    clean = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and not k.startswith("HF_")}
    more = {"HF_ENDPOINT": endpoint, "ROOFLINE_HOME": str(home), "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**clean, **more}, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.e2e
def test_snapshot_is_the_model_without_code(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    done = _pull(hub, tmp_path, "hf:org/repo")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    held = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != "manifest.json"}
    assert held == {name: FILES[name] for name in ("model.safetensors", "config.json", "tokenizer.json")}
    assert json.loads((folder / "manifest.json").read_text())["source"] == f"hf:org/repo@{REVISION}"
    assert "%|" not in done.stderr  # the hub's own progress bars are off
    before = len(Hub.gets)
    assert _pull(hub, tmp_path, "hf:org/repo").stdout == done.stdout
    assert len(Hub.gets) == before


@pytest.mark.e2e
def test_download_cut_in_the_middle_goes_on(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    Hub.cut = [True]
    done = _pull(hub, tmp_path, "hf:org/repo:model.safetensors")
    if done.returncode:  # the hub's client gave up: the next pull resumes
        done = _pull(hub, tmp_path, "hf:org/repo:model.safetensors")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == FILES["model.safetensors"]
    assert [name for name, _ in Hub.gets] == ["model.safetensors", "model.safetensors"]
    resumed = Hub.gets[1][1]
    assert resumed is not None
    assert int(resumed.removeprefix("bytes=").split("-")[0]) > 0  # not from the beginning


@pytest.mark.e2e
@pytest.mark.slow
def test_whole_files_of_a_killed_pull_are_kept_and_its_pieces_removed(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    folder = Path(_pull(hub, tmp_path, "hf:org/repo").stdout.strip())
    (folder / "manifest.json").unlink()
    (folder / "config.json").unlink()
    orphan = folder / ".cache" / "huggingface" / "download" / "hash.etag.0123abcd.incomplete"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"half")
    Hub.gets.clear()
    done = _pull(hub, tmp_path, "hf:org/repo")
    assert done.returncode == 0, done.stderr
    assert not orphan.exists()
    assert (folder / "config.json").read_bytes() == FILES["config.json"]
    assert [name for name, _ in Hub.gets] == ["config.json"]


@pytest.mark.e2e
def test_unknown_repository_is_one_line(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    done = _pull(hub, tmp_path, "hf:org/gone")
    assert done.returncode == 1
    assert "ConfigError: hf:org/gone: " in done.stderr.strip().splitlines()[-1]
