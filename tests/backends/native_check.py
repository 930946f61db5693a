"""Builds tests/backends/native, the check of all kernels, for this machine and others, as CMakeLists.txt says."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECK = Path(__file__).parent / "native"
CACHE = ROOT / "build" / "check"  # objects by the hash of what they are made of: a second run compiles nothing
# Below ROOT: objects of the core that a development installation left.
INSTALLED = "build/cp*/CMakeFiles/roofline_core.dir"
# The portable kernels take gcc 12 91 s with -O3 and 19 s with -O2. No option here lets the level change a bit, and the
# installed module, which has them with -O3, is compared with the other instruction sets by test_cpu_variants.py.
FAST_BUILD = "-O2"
BRANCH = re.compile(r'^(?:else)?if\(CMAKE_SYSTEM_PROCESSOR MATCHES "([^"]*)"\)$', re.M)
OPTIONS = re.compile(r'^\s*set_source_files_properties\((\S+) PROPERTIES COMPILE_OPTIONS\s+"([^"]*)"\)', re.M)


@dataclass(frozen=True)
class Recipe:
    """Sources of the core with the options of each, and the options of all, for one architecture."""

    sources: dict[str, list[str]]
    common: list[str]


def recipe(arch: str) -> Recipe:
    """What CMakeLists.txt compiles on `arch` (a name as `platform.machine()` gives it), without the Python bindings."""
    text = (ROOT / "CMakeLists.txt").read_text()
    core = re.search(r"^set\(CORE\n(.*?)^\)", text, re.M | re.S)
    common = re.search(r"^set\(ARITHMETIC (.*)\)$", text, re.M)
    branches = list(BRANCH.finditer(text))
    if core is None or common is None or not branches:
        raise ValueError("CMakeLists.txt has another shape: mend this function")
    sources: dict[str, list[str]] = {name: [] for name in re.findall(r"native/\w+\.cpp", core[1])}
    flags = [*common[1].split(), "-std=c++17", "-fPIC"]
    ends = [match.start() for match in branches[1:]] + [text.index("endif()", branches[-1].end())]
    for match, end in zip(branches, ends, strict=True):
        if not re.search(match[1], arch):
            continue
        branch = text[match.end() : end]
        added = re.search(r"list\(APPEND CORE (.*)\)", branch)
        definition = re.search(r"set\(ISA_DEFINITIONS (\w+)\)", branch)
        if added is None or definition is None:
            raise ValueError("CMakeLists.txt has another shape: mend this function")
        sources |= {name: [] for name in added[1].split()}
        sources |= {name: options.split(";") for name, options in OPTIONS.findall(branch)}
        flags.append(f"-D{definition[1]}")
    return Recipe(sources, flags)


def installed_objects(sources: Iterable[str]) -> dict[str, Path]:
    """Objects of `sources` that `make setup` compiled for this machine; empty where one is missing or older."""
    newest = max(path.stat().st_mtime for path in (ROOT / "native").rglob("*.*"))
    for folder in sorted(ROOT.glob(INSTALLED)):
        objects = {name: folder / f"{name}.o" for name in sources}
        if all(path.exists() and path.stat().st_mtime > newest for path in objects.values()):
            return objects
    return {}


def build(compiler: str, arch: str, extra: Sequence[str] = (), only_portable: bool = False) -> Path:
    """The check program for `arch`, made by `compiler`. `extra` options come last, when compiling and when linking.

    The program for this machine without `extra` options has the objects of the development installation if it can.
    Raises subprocess.CalledProcessError with the compiler's words.
    """
    made = recipe(arch)
    plain = arch == platform.machine() and not extra and not only_portable
    installed = installed_objects(made.sources) if plain else {}
    missing = {name: options for name, options in made.sources.items() if name not in installed}
    common = [word for word in made.common if not (only_portable and word.startswith("-DROOFLINE_HAS"))]
    work = [
        (ROOT / name, [*options, *_level(name), *extra])
        for name, options in missing.items()
        if not (only_portable and options)
    ]
    work += [(path, list(extra)) for path in sorted(CHECK.glob("*.cpp"))]
    objects = [*installed.values(), *compile_all(compiler, common, work)]
    return link(compiler, objects, extra, f"check-{arch}")


def build_sanitised(
    compiler: str, options: Sequence[str], variant: str, programs: Mapping[str, Sequence[Path]]
) -> dict[str, Path]:
    """Programs for this machine, each linked with the core, in which all but the kernels of other instruction sets
    than `variant` is compiled with `options`; these are as the check program has them.

    Args:
        variant: of the kernels, such as ``avx2``.
        programs: name -> its sources, of which those of `CHECK` are compiled without the options.
    """
    made = recipe(platform.machine())
    installed = installed_objects(made.sources)
    others = [name for name in made.sources if "kernels_" in name and not name.endswith(f"_{variant}.cpp")]
    core = [(ROOT / name, [*flags, *options]) for name, flags in made.sources.items() if name not in others]
    core += [(ROOT / name, [*made.sources[name], *_level(name)]) for name in others if name not in installed]
    shared = [*(installed[name] for name in others if name in installed), *compile_all(compiler, made.common, core)]
    linked = {}
    for name, sources in programs.items():
        work = [(path, [] if path.parent == CHECK else list(options)) for path in sources]
        linked[name] = link(compiler, [*shared, *compile_all(compiler, made.common, work)], options, name)
    return linked


def _level(name: str) -> list[str]:
    return [FAST_BUILD] if name.endswith("kernels_portable.cpp") else []


def compile_all(compiler: str, common: Sequence[str], work: Sequence[tuple[Path, list[str]]]) -> list[Path]:
    """Objects of sources, each with options of its own behind the common ones. What is there is not made again."""
    CACHE.mkdir(parents=True, exist_ok=True)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    folders = [ROOT / "native", ROOT / "native/isa", ROOT / "native/library", ROOT / "include", CHECK]
    headers = sorted(header for folder in folders for header in folder.glob("*.h"))
    state = hashlib.sha256(version.encode() + b"".join(path.read_bytes() for path in headers))
    places = [f"-I{folder}" for folder in folders]

    def compiled(item: tuple[Path, list[str]]) -> Path:
        source, options = item
        command = [compiler, *common, *places, *options, "-c", str(source)]
        digest = state.copy()
        digest.update(repr(command).encode() + source.read_bytes())
        target = CACHE / f"{source.stem}-{digest.hexdigest()[:16]}.o"
        if not target.exists():
            partial = target.with_suffix(f".{os.getpid()}")
            subprocess.run([*command, "-o", str(partial)], check=True)
            partial.rename(target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        return list(workers.map(compiled, work))


def link(compiler: str, objects: Sequence[Path], options: Sequence[str], name: str) -> Path:
    """A program of these objects."""
    state = hashlib.sha256(repr([(path, path.stat().st_mtime_ns) for path in objects]).encode())
    program = CACHE / f"{name}-{state.hexdigest()[:16]}"
    if not program.exists():
        partial = program.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *options, *map(str, objects), "-pthread", "-o", str(partial)], check=True)
        partial.rename(program)
    return program


def host_compiler() -> str | None:
    """CXX, or the system's C++ compiler; None where there is none."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
