"""Measures the structure of `src/roofline`, and fails where it breaks a rule of docs/map.md.

    python -m tools.house            # each figure beside its limit; exit status 1 when one is exceeded
    python -m tools.house --list     # every place behind the figures, one line each
    python -m tools.house --list src/roofline/train   # of one folder

The rules: names say what a thing is (few bare participles and vague words), a class has a name that no other class of
the package has, records of many fields are filled by keyword, functions stay short and take few parameters, modules do
not import each other in a circle (imports inside functions count, those for type checking do not), and folders of a
room depend on each other one way.
"""

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "roofline"

# Words that say what happened to a thing, not what it is. `called_at` or `kept_pages` are fine: only bare ones count.
PARTICIPLES = frozenset(
    [
        *("found", "held", "given", "said", "asked", "wanted", "made", "known", "kept", "gone", "left", "took"),
        *("taken", "meant", "told", "seen", "whole", "both", "others", "brought", "shown", "named", "beside", "ahead"),
    ]
)
MOST_PARTICIPLES = 0.003  # of all stored names
# Words that stand for any thing, where a name says which: `row` instead of `each`, `limit` instead of `most`.
VAGUE = frozenset(["each", "most", "own", "rest", "what"])
MOST_VAGUE = 0.012  # of all stored names; it goes down with each folder that is renamed
MOST_PARAMETERS = 8
MOST_LINES = 60  # of a function, with its docstring
MOST_ANY = 12  # of `Any` in one room

# A jitted kernel's parameters are what its compiler sees; the signatures of an op and of `option` are declarations.
WIDE_FOLDERS = ("backends/gpu/kernels", "ops", "common/options.py")

MOST_POSITIONAL = 5  # arguments of a record, and fields of one that is filled by position

# The bodies of an API are named as it names them, also in /openapi.json.
NAMED_FROM_OUTSIDE = ("server/routes/*/schema.py",)
# `Config` is what each family's module calls its own. The others are still shared: a name leaves this list with the
# second-to-last class that has it.
SHARED_CLASS_NAMES = frozenset(
    ["Config", *("Answers", "Counts", "Device", "Lengths", "Plan", "Price", "Rows", "Run", "Section", "Target")]
)


# All nodes of a file's syntax tree: it is walked once, and each figure looks through them.
Nodes = tuple[ast.AST, ...]
Files = dict[Path, Nodes]


@dataclass(frozen=True)
class Place:
    """A line of a file that a figure counts, and what is there."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def syntax(folder: Path = SOURCE) -> Files:
    """The Python files of a folder, parsed."""
    return {path: tuple(ast.walk(ast.parse(path.read_text("utf-8")))) for path in sorted(folder.rglob("*.py"))}


def stored_names(nodes: Nodes) -> Iterator[tuple[str, int]]:
    """(name, line) of every variable, parameter, attribute and function that a file gives a name to."""
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno


def named_by(words: frozenset[str], files: Files) -> tuple[int, list[Place]]:
    """How many names are stored, and those of them that are one of these words alone."""
    names = [(path, name, line) for path, nodes in files.items() for name, line in stored_names(nodes)]
    places = [Place(path, line, name) for path, name, line in names if name.strip("_") in words]
    return len(names), places


def classes(files: Files, root: Path = SOURCE) -> dict[str, list[Place]]:
    """Return where each name of a class stands: of the modules' own public classes, outside of NAMED_FROM_OUTSIDE."""
    places: dict[str, list[Place]] = defaultdict(list)
    for path, nodes in files.items():
        relative = path.relative_to(root) if path.is_relative_to(root) else path
        if any(relative.match(pattern) for pattern in NAMED_FROM_OUTSIDE):
            continue
        module = nodes[0]
        assert isinstance(module, ast.Module), "ast.walk begins with it"
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(Place(path, node.lineno, f"class {node.name}"))
    return dict(places)


def shared_class_names(files: Files, root: Path = SOURCE) -> list[Place]:
    """Classes that share their name with a class of another file, apart from SHARED_CLASS_NAMES."""
    named = classes(files, root).items()
    return [place for name, places in named if len(places) > 1 and name not in SHARED_CLASS_NAMES for place in places]


def _is_record(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
    return bool(bases & {"NamedTuple", "Struct"}) or any(
        "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def _field_count(node: ast.ClassDef) -> int:
    annotations = [ast.unparse(line.annotation) for line in node.body if isinstance(line, ast.AnnAssign)]
    return len([annotation for annotation in annotations if not annotation.startswith("ClassVar")])


def filled_by_position(files: Files) -> list[Place]:
    """Calls that give a record of more than MOST_POSITIONAL fields more than so many arguments by position."""
    large = {
        node.name
        for nodes in files.values()
        for node in nodes
        if isinstance(node, ast.ClassDef) and _is_record(node) and _field_count(node) > MOST_POSITIONAL
    }
    places = []
    for path, nodes in files.items():
        for node in nodes:
            if isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL:
                name = ast.unparse(node.func).split(".")[-1]
                if name in large or name == "cls":
                    places.append(Place(path, node.lineno, f"{name} is filled by {len(node.args)} positions"))
    return places


def _functions(nodes: Nodes) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def long_functions(files: Files) -> list[Place]:
    """Functions of more than MOST_LINES lines; a jitted kernel is one expression of its compiler's and not counted."""
    places = []
    for path, nodes in files.items():
        for function in _functions(nodes):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > MOST_LINES and not _is_jitted(function):
                places.append(Place(path, function.lineno, f"{function.name} has {lines} lines"))
    return places


def _is_torch_op(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is an operator of torch, or one of its kernels: its parameters are the operator's signature."""
    words = ("custom_op", "register_kernel", "register_fake")
    return any(word in ast.unparse(decorator) for decorator in function.decorator_list for word in words)


def _is_jitted(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def wide_functions(files: Files, root: Path = SOURCE) -> list[Place]:
    """Functions of more than MOST_PARAMETERS parameters, `self` and `cls` aside, outside of WIDE_FOLDERS."""
    places = []
    for path, nodes in files.items():
        if path.is_relative_to(root) and str(path.relative_to(root)).startswith(WIDE_FOLDERS):
            continue
        for function in _functions(nodes):
            arguments = function.args
            names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls")])
            if count > MOST_PARAMETERS and not _is_jitted(function) and not _is_torch_op(function):
                places.append(Place(path, function.lineno, f"{function.name} has {count} parameters"))
    return places


def uses_of_any(files: Files, root: Path = SOURCE) -> dict[str, list[Place]]:
    """Room -> where it says `Any`, imports aside."""
    places: dict[str, list[Place]] = defaultdict(list)
    for path, nodes in files.items():
        room = path.relative_to(root).parts[0] if path.is_relative_to(root) else path.parent.name
        for node in nodes:
            if isinstance(node, ast.Name) and node.id == "Any":
                places[room].append(Place(path, node.lineno, "Any"))
    return dict(places)


def is_type_checking(test: ast.expr) -> bool:
    """Whether a condition holds for type checkers only: TYPE_CHECKING, of `typing` or imported from there."""
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports(files: Files, root: Path = SOURCE) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, also inside functions, but not for type checking."""
    names = {path: _module(path, root) for path in files}
    modules = set(names.values())
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for path, nodes in files.items():
        typing_only = {
            node
            for block in nodes
            if isinstance(block, ast.If) and is_type_checking(block.test)
            for node in ast.walk(block)
        }
        for node in nodes:
            if node in typing_only:
                continue
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
            elif isinstance(node, ast.Import):
                targets = [(alias.name, alias.name) for alias in node.names]
            else:
                continue
            for longer, shorter in targets:
                target = longer if longer in modules else shorter
                if target in modules and target != names[path]:
                    graph[names[path]].add(target)
    return graph


def _module(path: Path, root: Path) -> str:
    parts = (root.name, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def folder_of(module: str) -> str:
    """The folder inside a room that a module lies in (a room of `backends` is one folder deeper); a module that lies
    in the room itself stands for itself."""
    parts = module.split(".")
    depth = 4 if parts[1:2] == ["backends"] else 3
    return ".".join(parts[:depth]) if len(parts) > depth else module


def folders(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph of imports with the modules of each inner folder taken together."""
    grouped: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph.items():
        grouped[folder_of(module)] |= {folder_of(target) for target in targets} - {folder_of(module)}
    return dict(grouped)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of nodes that reach each other (Tarjan's strongly connected components of two or more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            cut = stack.index(node)
            component = sorted(stack[cut:])
            del stack[cut:]
            if len(component) > 1:
                components.append(component)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return components


def report(files: Files, root: Path = SOURCE) -> tuple[list[tuple[str, str, bool]], list[Place]]:
    """(figure, its value beside its limit, whether it is kept) of each rule, and the places behind them."""
    count, names = named_by(PARTICIPLES, files)
    _, vague = named_by(VAGUE, files)
    long, wide, graph = long_functions(files), wide_functions(files, root), imports(files, root)
    anys = uses_of_any(files, root)
    most = max(anys, key=lambda room: len(anys[room]), default="")
    share = len(names) / max(count, 1)
    modules, groups = circles(graph), circles(folders(graph))
    any_count = len(anys.get(most, ()))
    homonyms, positional = shared_class_names(files, root), filled_by_position(files)
    rows = [
        ("participles as names", f"{len(names)} of {count}: {share:.2%}, limit {MOST_PARTICIPLES:.1%}",
         share < MOST_PARTICIPLES),
        ("vague words as names", f"{len(vague)}: {len(vague) / max(count, 1):.2%}, limit {MOST_VAGUE:.1%}",
         len(vague) <= MOST_VAGUE * count),
        ("classes with another's name", str(len(homonyms)), not homonyms),
        (f"records filled by over {MOST_POSITIONAL} positions", str(len(positional)), not positional),
        (f"functions over {MOST_LINES} lines", str(len(long)), not long),
        (f"functions over {MOST_PARAMETERS} parameters", str(len(wide)), not wide),
        ("circles of modules", "; ".join(" ".join(circle) for circle in modules) or "0", not modules),
        ("circles of folders", "; ".join(" ".join(circle) for circle in groups) or "0", not groups),
        ("`Any`, in the room with most", f"{any_count} in {most}, limit {MOST_ANY}", any_count <= MOST_ANY),
    ]  # fmt: skip
    places = [
        *names,
        *vague,
        *homonyms,
        *positional,
        *long,
        *wide,
        *(place for room in anys.values() for place in room),
    ]
    return rows, places


def main(words: Iterable[str]) -> int:
    """Print the report; 1 when a rule is broken."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__.splitlines()[0])
    parser.add_argument("--list", nargs="?", const="", metavar="FOLDER", help="print the places too, of a folder")
    options = parser.parse_args(list(words))
    rows, places = report(syntax())
    if options.list is not None:
        within = Path(options.list).resolve() if options.list else SOURCE
        for place in places:
            if place.path.is_relative_to(within):
                print(place)
    for figure, value, is_kept in rows:
        print(f"{'ok  ' if is_kept else 'FAIL'} {figure}: {value}")
    total = sum(len(path.read_text("utf-8").splitlines()) for path in SOURCE.rglob("*.py"))
    print(f"     lines of src/roofline: {total:,}; `Any`: {sum(place.what == 'Any' for place in places)}")
    return 0 if all(is_kept for _, _, is_kept in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
