"""Other builds find libroofline: by CMake's find_package, by pkg-config, as a part of their own, shared and static."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from library_programs import ROOT, documented, greedy

import roofline

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc"),
]


def run(*words: Any, cwd: Path | None = None, **variables: str) -> str:
    """What a command prints. Shows all of it where it fails."""
    environment = {**os.environ, **variables}
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, cwd=cwd, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An option of cmake: most of a build is to optimise it, which changes no bit of a result. The second build of
    the same files has them from a cache."""
    folder = tmp_path_factory.mktemp("hasty")
    script, cache = folder / "hasty", shutil.which("ccache") or ""
    script.write_text(f'#!/bin/sh\nCCACHE_DIR={folder}/ccache exec {cache} "$@" -O0\n')
    script.chmod(0o755)
    return f"-DCMAKE_CXX_COMPILER_LAUNCHER={script}"


def installed_in(folder: Path, *options: str) -> Path:
    """The prefix of an installation without Python, moved after it was made."""
    build, prefix = folder / "build", folder / "prefix"
    run("cmake", "-S", ROOT, "-B", build, "-DROOFLINE_PYTHON=OFF", f"-DCMAKE_INSTALL_PREFIX={prefix}", *options)
    run("cmake", "--build", build, "-j", "2")
    run("cmake", "--install", build)
    return prefix.rename(folder / "moved")


@pytest.fixture(scope="module")
def prefix(hasty: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed_in(tmp_path_factory.mktemp("installed"), hasty)


def answers(program: Path, bundle: Path) -> bool:
    """Whether a program gives the ids that Python gives."""
    ids = run(program, bundle, 5, 1, 2).split("\n")[0].split()
    return list(map(int, ids)) == greedy(bundle, [1, 2], 5)[0]


def test_names_and_versions(prefix: Path) -> None:
    version = roofline.__version__.split("+")[0]
    (library,) = prefix.glob("lib*/libroofline.so")
    assert library.resolve().name == f"libroofline.so.{version}"
    assert (library.parent / "libroofline.so.0").resolve() == library.resolve()
    assert "soname: [libroofline.so.0]" in run("readelf", "-d", library)
    (archive,) = prefix.glob("lib*/libroofline.a")
    declared = set(re.findall(r"^RL_API .*?\b(rl_\w+)\(", (prefix / "include/roofline.h").read_text(), re.MULTILINE))
    strong = re.findall(r" [A-TX-Z] (\S+)", run("nm", "--defined-only", "--extern-only", archive))
    assert set(strong) == declared


HOST = """cmake_minimum_required(VERSION 3.18)
project(host LANGUAGES C CXX)
add_library(core STATIC core.c)
{roofline}
foreach(kind roofline roofline_static)
  add_executable(answer_${{kind}} answer.c)
  target_link_libraries(answer_${{kind}} PRIVATE core roofline::${{kind}})
endforeach()
install(TARGETS core DESTINATION lib)
"""
FOUND = """find_package(roofline 9 CONFIG QUIET)
if(roofline_FOUND)
  message(FATAL_ERROR "a version that is not there was found")
endif()
find_package(roofline 0.1 CONFIG REQUIRED)
"""


def host(folder: Path, roofline: str, *options: str) -> Path:
    """The build of another project, which has a target named core too; `roofline`: how it gets the library."""
    (folder / "CMakeLists.txt").write_text(HOST.format(roofline=roofline))
    (folder / "core.c").write_text("int core(void) { return 1; }\n")
    (folder / "answer.c").write_text(documented())
    build = folder / "host"
    run("cmake", "-S", folder, "-B", build, *options)
    run("cmake", "--build", build, "-j", "2")
    return build


def test_find_package(prefix: Path, bundle: Path, tmp_path: Path) -> None:
    build = host(tmp_path, FOUND, f"-DCMAKE_PREFIX_PATH={prefix}")
    assert answers(build / "answer_roofline", bundle)
    assert answers(build / "answer_roofline_static", bundle)
    assert "libroofline.so.0" in run("readelf", "-d", build / "answer_roofline")
    assert "libroofline" not in run("readelf", "-d", build / "answer_roofline_static")


def test_a_part_of_another_build(hasty: str, bundle: Path, tmp_path: Path) -> None:
    build = host(tmp_path, f"add_subdirectory({ROOT} roofline)", hasty)
    assert answers(build / "answer_roofline", bundle)
    assert answers(build / "answer_roofline_static", bundle)
    run("cmake", "--install", build, "--prefix", tmp_path / "prefix")
    assert [file.name for file in (tmp_path / "prefix").rglob("*.*")] == ["libcore.a"]


def test_pkg_config(prefix: Path, bundle: Path, tmp_path: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("there is no pkg-config")
    (library,) = prefix.glob("lib*/libroofline.so")
    (tmp_path / "answer.c").write_text(documented())

    def flags(*words: str) -> list[str]:
        return run("pkg-config", *words, "roofline", PKG_CONFIG_PATH=str(library.parent / "pkgconfig")).split()

    strict = ["-std=c99", "-Wall", "-Werror", "answer.c"]
    run("gcc", *strict, *flags("--cflags", "--libs"), f"-Wl,-rpath,{library.parent}", "-o", "shared", cwd=tmp_path)
    assert answers(tmp_path / "shared", bundle)
    run("gcc", "-static", *strict, *flags("--static", "--cflags", "--libs"), "-o", "static", cwd=tmp_path)
    assert answers(tmp_path / "static", bundle)
    assert flags("--modversion") == [roofline.__version__.split("+")[0]]


@pytest.mark.soak
def test_an_optimised_build(bundle: Path, tmp_path: Path) -> None:
    build = host(tmp_path, FOUND, f"-DCMAKE_PREFIX_PATH={installed_in(tmp_path / 'library')}")
    assert answers(build / "answer_roofline", bundle)
