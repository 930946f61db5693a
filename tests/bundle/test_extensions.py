"""Extensions as packages: found, called once, named when broken; and what they register in files, show and bundles."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("roofline._native", reason="the cpu backend is not built")

from roofline.backends import table
from roofline.common import extensions
from roofline.models import registry as families
from roofline.ops import formats
from roofline.ops import registry as op_registry
from roofline.program import compile as passes
from roofline.program.compile import stage_names
from roofline.program.restate import format_named
from roofline.weights.checkpoint import read_config
from tests.bundle.bundle_models import CONFIG as HF_CONFIG
from tests.command_line import call_roofline

MODULE = """
import numpy as np
from roofline import ops
from roofline.extend import Format, expand, op, register_family, register_format, register_pass
from roofline.models import llama


def unpack(blocks):
    return (blocks[:, 4:].view(np.int8).astype(np.float32) * np.ascontiguousarray(blocks[:, :4]).view("<f4"))


def pack(values):
    scale = (np.abs(values).max(axis=1, keepdims=True) / np.float32(127)).astype("<f4")
    scale[scale == 0] = 1
    return np.concatenate([scale.view(np.uint8), np.rint(values / scale).astype(np.int8).view(np.uint8)], axis=1)


class Parallel:
    check, embed, head = staticmethod(llama.check), staticmethod(llama.embed), staticmethod(llama.head)

    def spec(self, cfg):
        return llama.spec(cfg)

    def block(self, cfg, w, x, layer, batch):
        attended = llama.attention(cfg, w.attn, ops.rms_norm(x, w.attn_norm.weight, cfg.norm_eps), layer, batch)
        return x + attended + llama.mlp(w.mlp, ops.rms_norm(x, w.mlp_norm.weight, cfg.norm_eps))


def register():
    print("registering", flush=True)
    register_format(Format("W8", 32, 36, 201, unpack, pack, packed_as="F32"))
    register_family("parallel", Parallel(), gguf="parallel")
"""


@pytest.fixture
def package(tmp_path: Path):  # type: ignore[no-untyped-def]
    """package(module text, value) -> run(code): a process that finds a package with this entry point."""

    def make(module: str, value: str = "outside:register"):  # type: ignore[no-untyped-def]
        site = tmp_path / "site"
        info = site / "outside_package-1.2.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (site / "outside.py").write_text(module)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-package\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[roofline.extensions]\nparallel = {value}\n")
        path = os.pathsep.join([str(site), *(p for p in sys.path if p)])
        variables = {**os.environ, "PYTHONPATH": path, "ROOFLINE_HOME": str(tmp_path / "home"), "COLUMNS": "100"}
        variables |= {"ROOFLINE_BUNDLES": "on"}
        return lambda code, *args: subprocess.run(
            [sys.executable, "-c", code, *args], env=variables, capture_output=True, text=True, timeout=120
        )

    return make


CLI = "import sys; from roofline.cli.main import main; sys.exit(main())"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A GGUF file of the family and the format that MODULE registers."""
    code = """
    import sys
    sys.path.insert(0, sys.argv[2])
    import outside
    outside.register()
    import weights_builders as builders
    made = builders.tiny_llama("W8")
    made.pairs = [(k.replace("llama", "parallel"), t, "parallel" if v == "llama" else v) for k, t, v in made.pairs]
    open(sys.argv[1], "wb").write(made.build())
    """
    path, site = tmp_path / "model.gguf", tmp_path / "build"
    site.mkdir()
    (site / "outside.py").write_text(MODULE)
    builders = Path(__file__).parents[1] / "weights"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *(p for p in sys.path if p)])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path), str(builders)],
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return path


LOAD = """
import sys
from roofline.bundle import load
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
loaded = load(sys.argv[1], backend=sys.argv[2], cache_tokens=64, max_running=1, text=False)
engine = LocalEngine(loaded.executable)
engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
ids = []
while engine.has_work:
    ids += [token for event in engine.step() for token in event.ids]
print(ids)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package on this process's path that registers one name in each registry, and nothing is loaded yet."""
    site, info = tmp_path / "site", tmp_path / "site" / "outside_package-1.2.dist-info"
    info.mkdir(parents=True)
    (site / "outside_names.py").write_text(NAMES)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-package\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[roofline.extensions]\nnames = outside_names:register\n")
    op_registry.names()
    for module, name in (
        (op_registry, "_OPS"), (passes, "_REGISTERED"), (families, "_FAMILIES"), (families, "_FILE_KINDS"),
        (families, "_LIKE"), (formats, "FORMATS"), (table, "_BACKENDS"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    monkeypatch.setattr(extensions, "_loaded", {})
    monkeypatch.setattr(extensions, "_registered", [])
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    yield
    sys.modules.pop("outside_names", None)


NAMES = """
from roofline.extend import Format, op, register_backend, register_family, register_format, register_pass
from roofline.ops import formats


def register():
    eight = formats.get("Q8_0")
    register_pass("outside_pass", lambda program: program)
    register_format(Format("outside_format", 32, 34, 300, eight.unpack, eight.pack, packed_as="F32"))
    register_family("outside_family", "roofline.models.llama", hf="outside_type")
    register_backend("outside_backend", "outside_names:BACKEND")

    def outside_op(x):
        return x

    op(values=("x",), infer=lambda call: call.x)(outside_op)
"""


def _config_of_its_type(folder: Path) -> str:
    fields = {**HF_CONFIG, "model_type": "outside_type"}
    (folder / "config.json").write_text(json.dumps(fields))
    return str(read_config(folder)["family"])


ASKED = {
    "pass": lambda folder: stage_names().index("outside_pass"),
    "format": lambda folder: formats.get("outside_format"),
    "format in any spelling": lambda folder: format_named("OUTSIDE_FORMAT"),
    "family": lambda folder: families.get("outside_family"),
    "family of files": _config_of_its_type,
    "op": lambda folder: op_registry.get("outside_op"),
    "backend": lambda folder: table.require("outside_backend"),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ASKED)
def test_a_name_of_a_package_is_known_to_whoever_asks_first(name: str, tmp_path: Path) -> None:
    ASKED[name](tmp_path)


@pytest.mark.usefixtures("installed")
def test_show_prints_the_program_after_a_pass_of_a_package() -> None:
    shown = call_roofline(["show", "preset:smollm2-135m", "--pass", "outside_pass"])
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.startswith("program ")
    refused = call_roofline(["show", "preset:smollm2-135m", "--pass", "outside"])
    assert (refused.exit_code, "trace, outside_pass, narrow" in refused.stderr) == (1, True)


@pytest.mark.slow
def test_an_installed_extension_is_found_by_commands(package, model: Path) -> None:  # type: ignore[no-untyped-def]
    run = package(MODULE)
    shown = run(CLI, "show", str(model))
    assert shown.returncode == 0, shown.stderr
    assert "W8 as F32" in shown.stdout
    # Four bytes a weight are read: 64 x 96 of `down`.
    assert "24.0 KiB" in shown.stdout
    ids = [run(LOAD, str(model), backend) for backend in ("cpu", "cpu", "reference")]
    assert [done.returncode for done in ids] == [0, 0, 0], [done.stderr for done in ids]
    assert {done.stdout.splitlines()[-1] for done in ids} == {ids[0].stdout.splitlines()[-1]}
    assert all(done.stdout.count("registering") == 1 for done in ids), "once in each process"
    assert "Compiled" in ids[0].stderr
    assert "Compiled" not in ids[1].stderr, "a bundle is kept while the extension stays as it is"
    listed = json.loads(run(CLI, "doctor", "--json").stdout.partition("\n")[2])
    assert listed["extensions"] == [{"name": "parallel", "package": "outside-package 1.2"}]


def test_a_changed_extension_makes_a_new_bundle(package, model: Path) -> None:  # type: ignore[no-untyped-def]
    assert package(MODULE)(LOAD, str(model), "cpu").returncode == 0
    changed = package(MODULE + "\n# changed\n")(LOAD, str(model), "cpu")
    assert "Compiled" in changed.stderr


def test_a_wrong_mapping_does_not_start(package, model: Path) -> None:  # type: ignore[no-untyped-def]
    wrong = MODULE.replace('packed_as="F32"', 'packed_as="F32", convert=lambda b: (2 * unpack(b)).view(np.uint8)')
    done = package(wrong)(LOAD, str(model), "cpu")
    assert done.returncode != 0
    assert "W8 kernels" in done.stderr
    inexact = package(MODULE.replace('packed_as="F32"', 'packed_as="BF16"'))(LOAD, str(model), "cpu")
    assert "cannot hold all of its values exactly" in inexact.stderr


@pytest.mark.parametrize(
    ("module", "value", "message"),
    [
        ("import nothing_here", "outside:register", "No module named 'nothing_here'"),
        ("", "outside:register", "register"),
        ("def register():\n    raise ValueError('out of luck')", "outside:register", "ValueError: out of luck"),
        (
            "from roofline.extend import register_family\ndef register():\n    register_family('llama', 'outside')",
            "outside:register",
            "a model family named 'llama' is already registered",
        ),
    ],
)
def test_a_broken_extension_is_named(package, smollm2_path: Path, module: str, value: str, message: str) -> None:  # type: ignore[no-untyped-def]
    done = package(module, value)(CLI, "show", str(smollm2_path))
    assert done.returncode == 1
    assert "outside-package 1.2" in done.stderr
    assert message in done.stderr
    assert "uninstall outside-package" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_extensions_nothing_is_imported_for_them() -> None:
    code = "import sys\nfrom roofline.common import extensions\nassert extensions.load() == ()\n"
    code += "assert extensions.key() == ''"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nassert 'importlib.metadata' not in sys.modules"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
