"""The house's arrows: a room imports rooms below it, never above; the serving rooms work without torch.

What else is looked for in the syntax of the whole package is here too, as parsing it takes longer than the tests do.
"""

import ast
from pathlib import Path

import pytest

import roofline
from tools import house

PACKAGE = Path(roofline.__file__).parent
# room: what it may import. `hardware` and above all see `common`.
BELOW = {"common": set()}
for room, lower in (
    ("hardware", ("common",)),
    ("ops", ("hardware",)),
    ("models", ("ops",)),
    ("program", ("models",)),
    ("weights", ("models",)),
    ("text", ("models",)),
    ("backends", ("program",)),
    ("bundle", ("backends", "weights", "text")),
    ("engine", ("bundle",)),
    ("train", ("bundle",)),
    ("server", ("engine",)),
    ("torch", ("server",)),
    ("deploy", ("server",)),
    ("bench", ("train", "torch", "deploy")),
    ("cli", ("bench",)),
):
    BELOW[room] = set(lower).union(*(BELOW[below] for below in lower))

# Folders that may import torch, and never at the top of a module: outside of these no import at all. Training is torch,
# but what it reads is not; a Triton kernel needs both at the top; `roofline.torch` is for who has torch.
TORCH_ROOMS = {"ops", "models", "backends", "train", "torch", "bench"}
TORCH_FILES = {Path("weights/files/torch_pickle.py")}  # reads torch's own files, and says what to install without it
NO_TORCH_IN_TRAIN = {
    *("config", "data", "storage", "parity", "schedule", "flops", "projection"),
    *("cards", "page"),
}
HEAVY = {"torch", "transformers", "triton"}
NO_TORCH = (
    "common",
    "hardware",
    "text",
    "weights",
    "bundle",
    "engine",
    "server",
    "deploy",
    "bench",
    "cli",
    "program",
    "ops",
    "models",
    "backends",
)


def _is_torch(parts):
    if parts[0] == "torch" or parts[:3] == ("backends", "gpu", "kernels"):
        return parts[-1] != "__init__.py"
    free = NO_TORCH_IN_TRAIN.intersection(part.removesuffix(".py") for part in parts[1:])
    return parts[0] == "train" and parts[-1] != "__init__.py" and not free


def sources():
    return sorted(path for path in PACKAGE.rglob("*.py"))


@pytest.fixture(scope="module")
def syntax():
    """Path -> the nodes of the file's syntax tree, the tree first."""
    return house.syntax(PACKAGE)


def imports(path, tree):
    """(module, at the top level of the file, only for type checking) of every import in a file."""
    collected = []

    def visit(node, top, typing_only):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                collected.extend((name.name, top, typing_only) for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                collected.extend((f"{child.module}.{name.name}", top, typing_only) for name in child.names)
            elif isinstance(child, ast.stmt):
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                checking = isinstance(child, ast.If) and house.is_type_checking(child.test)
                visit(child, top and not function, typing_only or checking)
            elif not isinstance(child, ast.expr):  # handlers of exceptions and cases of a match have statements too
                visit(child, top, typing_only)

    visit(tree, True, False)
    return collected


def arrow_faults(path, tree):
    """What each import of a file breaks, in a sentence."""
    parts = path.relative_to(PACKAGE).parts
    for module, top, typing_only in imports(path, tree):
        root, *rest = module.split(".")
        if root in HEAVY and not typing_only:
            if parts[0] not in TORCH_ROOMS and path.relative_to(PACKAGE) not in TORCH_FILES:
                yield f"{path} imports {module}"
            elif top and not _is_torch(parts):
                yield f"{path} imports {module} at import time"
        if root != "roofline" or len(parts) == 1 or not rest or rest[0] in ("__version__", "_native"):
            continue
        if rest[0] != parts[0] and rest[0] not in BELOW[parts[0]]:
            yield f"{path}: {parts[0]} may not import {module}"


@pytest.mark.parametrize("room", ["", *BELOW])
def test_arrows(room, syntax):
    files = [path for path in sources() if path.relative_to(PACKAGE).parts[:-1][:1] == ((room,) if room else ())]
    assert files
    assert not [fault for path in files for fault in arrow_faults(path, syntax[path][0])]


def test_the_package_keeps_the_rules_of_the_house(syntax):
    rows, _ = house.report(syntax, PACKAGE)
    assert not [f"{figure}: {value}" for figure, value, is_kept in rows if not is_kept], "python -m tools.house --list"


def test_names_that_classes_may_share_are_still_shared(syntax):
    places = house.classes(syntax, PACKAGE)
    assert {name for name in house.SHARED_CLASS_NAMES if len(places.get(name, ())) < 2} == set()


def test_no_module_outside_ops_lists_op_names(syntax):
    """A dispatch table (a mapping from op to what computes it) is an implementation; a set of names is a property."""
    # What a backend has kernels for is the target's to say, and which activations a file may name the configuration's.
    # What `info` says of a family that there is none of is a guess from the keys of its configuration.
    declared = {"program/target.py", "models/config.py", "weights/config/unfamiliar.py"}
    pytest.importorskip("torch", reason="ops' references are written in torch")
    from roofline.ops import registry

    ours = [name for name in registry.names() if registry.get(name).reference.__module__.startswith("roofline.")]
    lists = []
    for path, nodes in syntax.items():
        where = path.relative_to(PACKAGE).as_posix()
        if where.startswith("ops/") or where in declared:
            continue
        for node in nodes:
            if isinstance(node, ast.Tuple | ast.Set | ast.List):
                named = [e.value for e in node.elts if isinstance(e, ast.Constant) and e.value in ours]
                if len(named) > 1:
                    lists.append(f"{where}:{node.lineno}: {named}")
    assert lists == []


def test_every_room_has_its_row():
    rooms = {path.relative_to(PACKAGE).parts[0] for path in sources() if path.parent != PACKAGE}
    assert rooms == set(BELOW)


def test_class_a_and_h_nothing_runs_code_that_data_holds(syntax):
    """No pickle, marshal, eval, exec; literals are read as Python's only from programs, which we write ourselves."""
    for path, nodes in syntax.items():
        for module, _, _ in imports(path, nodes[0]):
            assert module.split(".")[0] not in ("pickle", "dill", "marshal", "shelve", "cloudpickle"), path
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and node.attr == "literal_eval":
                assert path.relative_to(PACKAGE) == Path("program/text.py"), f"{path}:{node.lineno}"


def test_every_room_imports_without_torch(run_python):
    modules = [
        ".".join(("roofline", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in sources()
        if not _is_torch(path.relative_to(PACKAGE).parts)
        and path.relative_to(PACKAGE).parts[0] in (*NO_TORCH, "train")
        and path.name != "__main__.py"
    ]
    run_python(
        "import sys, importlib\n"
        "for name in ('torch', 'transformers', 'triton'): sys.modules[name] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n",
        timeout=120,
    )


def test_importing_the_package_does_nothing(run_python):
    """It is quick (best of several in this order of magnitude: 0.15 s) and brings in nothing heavy."""
    code = (
        "import sys, time; start = time.process_time(); import roofline; took = time.process_time() - start\n"
        "heavy = {'numpy', 'torch', 'msgspec', 'fastapi', 'rich', 'jinja2', 'tokenizers'} & set(sys.modules)\n"
        "print(took, *heavy)"
    )
    took, *heavy = min((run_python(code).split() for _ in range(5)), key=lambda words: float(words[0]))
    assert not heavy
    assert float(took) < 0.15
    assert "SamplingParams" in dir(roofline) or "SamplingParams" in roofline.__all__


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="nothing_here"):
        roofline.nothing_here
