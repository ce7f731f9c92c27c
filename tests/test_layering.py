"""The layout of dcpc/ and who may import whom, by reading the source of every module.

Tests share by tests/cases/, not by one another.
"""

import ast
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("dcpc", "models", "benchmarks", "examples", "tests")

# Folder -> its files and folders, from the bottom to the top, each with those that it imports.
# Exact: an import that is not here fails, and so does a right that nobody uses.
TABLE = {
    "dcpc": {
        "errors": "",
        "buckets": "errors",
        "ir": "buckets",
        "ops": "errors",
        "fx": "errors",
        "trace": "errors buckets ir ops fx",
        "symbolic_profile": "errors ir ops fx",
        "passes": "errors buckets ir ops fx symbolic_profile",
        "codegen": "errors buckets ir ops fx",
        "plan": "errors buckets ir ops fx trace passes symbolic_profile codegen",
        "verify": "errors buckets ir ops fx trace codegen plan",
        "runtime": "errors buckets ir fx",
        "compiled": (
            "errors buckets ir ops fx trace passes symbolic_profile codegen plan verify runtime"
        ),
        "api": (
            "errors buckets ir trace passes symbolic_profile codegen plan verify runtime compiled"
        ),
        "dynamo": "errors buckets codegen trace plan verify api",
        "__init__": "errors buckets passes runtime compiled api",
        "hf": "errors buckets plan runtime compiled api",
        "commands": (
            "errors buckets ir ops fx trace passes symbolic_profile codegen plan verify runtime "
            "compiled api __init__"
        ),
        "__main__": "commands",
    },
    "dcpc.ir": {
        "program": "",
        "masks": "",
        "placement": "",
        "graphs": "program",
        "costs": "",
        "thresholds": "",
        "__init__": "program masks placement graphs costs",
    },
    "dcpc.api": {
        "requests": "",
        "search": "requests",
        "plan_model": "requests search",
        "compiling": "requests search plan_model",
        "__init__": "requests search plan_model compiling",
    },
    "dcpc.trace": {
        "loss": "",
        "wrappers": "",
        "canonical": "",
        "formulas": "",
        "tables": "",
        "statistics": "",
        "value_checks": "",
        "value_branches": "loss",
        "capture": "canonical formulas loss tables statistics value_checks value_branches",
        "static": "capture loss",
        "__init__": "capture",
    },
    "dcpc.passes": {
        "__init__": "",
        "sharding": "",
        "placement": "sharding",
        "masks": "sharding",
        "recompute": "",
        "stages": "",
        "units": "",
        "unpad": "sharding",
        "value_ranges": "sharding",
        "dtypes": "",
    },
    "dcpc.symbolic_profile": {
        "polynomials": "",
        "ops": "polynomials",
        "memory": "polynomials ops",
        "seconds": "polynomials memory",
        "profile": "polynomials ops memory seconds",
        "evaluate": "polynomials ops memory seconds profile",
        "report": "polynomials evaluate",
        "__init__": "memory ops seconds profile evaluate report",
    },
    "dcpc.codegen": {
        "away": "",
        "collectives": "",
        "lower": "collectives",
        "joint": "away collectives lower",
        "variant": "away collectives lower joint",
        "__init__": "away collectives joint variant",
    },
    "dcpc.runtime": {
        "__init__": "",
        "groups": "",
        "checkpoint": "groups",
        "planner": "groups",
        "values": "",
        "data": "groups planner values",
        "parameters": "groups",
        "pipeline": "groups planner",
        "step": "groups planner data parameters pipeline",
        "averages": "groups step",
    },
    "dcpc.compiled": {
        "agreed_state": "",
        "seeds": "",
        "unpadding": "",
        "lengths": "",
        "memory": "",
        "dispatch": "lengths seeds memory unpadding",
        "materialize": "",
        "outputs": "dispatch",
        "editions": "dispatch outputs",
        "evaluation": "editions",
        "model": ("agreed_state seeds dispatch editions evaluation materialize outputs memory"),
        "pipeline": "agreed_state model editions outputs unpadding",
        "__init__": "model",
    },
    "dcpc.dynamo": {
        "numbers": "",
        "regions": "",
        "arguments": "numbers",
        "graph": "arguments numbers",
        "family": "arguments graph",
        "entry": "family numbers regions",
        "__init__": "entry",
    },
    "dcpc.hf": {
        "refusals": "",
        "collated": "",
        "step_batches": "",
        "sharded_trainer": "",
        "trainer": "refusals collated sharded_trainer step_batches",
        "__init__": "trainer",
    },
    "dcpc.commands": {
        "__init__": "",
        "shared": "",
        "report": "shared",
        "check": "shared",
        "calibrate": "shared",
        "simulate": "shared",
        "replay": "",
        "cli": "shared report check calibrate simulate replay",
    },
}
ROOMS = {folder: {u: set(may.split()) for u, may in rows.items()} for folder, rows in TABLE.items()}
TOP = {"__init__", "__main__", "errors"}
# Class names that say too little without a qualifier, a leading underscore or not.
VAGUE = {"Block", "Call", "Choice", "Memory", "Request", "Row", "Rows", "Run", "Split"}
# Of dcpc/: the fourteen of the compiler, and what puts it into others' loops.
MOST_FOLDERS = 16
MOST_ENTRIES = 12  # files and folders in a folder
# Folders of tests/ that benchmarks may run: they hold no test.
SHARED = (["cases"], ["exact"], ["faults"], ["fuzz"], ["mutants"], ["zoo"])
ALONGSIDE = {"__init__.py", "README.md", "__pycache__"}  # not counted, nor is data


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imported(tree: ast.AST, file: Path, root: Path = ROOT) -> list[tuple[int, str, str | None]]:
    """Returns (line, module, name or None) of every import in a file, relative ones resolved."""
    found: list[tuple[int, str, str | None]] = []
    package = file.relative_to(root).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, module, alias.name) for alias in node.names]
    return found


def reached(module: str, name: str | None, root: Path = ROOT) -> str:
    """Returns the module that `from module import name` reads: its submodule, or itself."""
    path = root.joinpath(*module.split("."), name or "")
    return f"{module}.{name}" if name and (path.is_dir() or is_file(path)) else module


def is_file(path: Path) -> bool:
    return path.with_suffix(".py").is_file()


@cache
def arrows(file: Path, root: Path = ROOT) -> list[tuple[int, str, str, str]]:
    """Returns (line, folder, importing, imported) of every import of dcpc in a file.

    The folder is the innermost that holds both; the other two are files or folders in it.
    """
    found = []
    own = file.relative_to(root).with_suffix("").parts
    for line, module, name in imported(parsed(file), file, root):
        other = tuple(reached(module, name, root).split("."))
        if other[0] != "dcpc":
            continue
        if root.joinpath(*other).is_dir():
            other = (*other, "__init__")
        same = next(i for i, pair in enumerate(zip(own, other, strict=False)) if len(set(pair)) > 1)
        found.append((line, ".".join(own[:same]), own[same], other[same]))
    return found


def layering_errors(file: Path, root: Path = ROOT) -> list[str]:
    errors = []
    own = file.relative_to(root).with_suffix("").parts
    for n in range(1, len(own)):
        rooms = ROOMS.get(".".join(own[:n]))
        if rooms is not None and own[n] not in rooms:
            errors.append(f"{file}: '{own[n]}' is not in the table of tests/test_layering.py")
    for line, folder, unit, target in arrows(file, root):
        may = ROOMS[folder].get(unit, set()) if folder in ROOMS else {target}
        if target not in may:
            errors.append(f"{file}:{line}: {unit} imports {target}; may: {sorted(may)}")
    return errors


def circle(graph: dict[str, set[str]]) -> set[str]:
    """Returns the nodes that are left where nobody without arrows can be taken away any more."""
    left = {node: set(to) for node, to in graph.items()}
    while ready := {node for node, to in left.items() if not to & set(left)}:
        left = {node: to for node, to in left.items() if node not in ready}
    return set(left)


# Imported where they are first used: torch's compilers take 2.4 s of `import dcpc`, scipy 0.3.
LATE = {
    ("dcpc.codegen.variant", "inductor"),
    ("torch.export._trace", None),
    ("scipy.sparse", "csr_matrix"),
    ("scipy.sparse.csgraph", "maximum_flow"),
}


def nested_imports(file: Path, root: Path = ROOT) -> list[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return [
        f"{file}:{line}: import inside a function; move it to the top"
        for function in ast.walk(parsed(file))
        if isinstance(function, functions)
        for line, module, name in imported(function, file, root)
        if (module, name) not in LATE
    ]


def private_imports(file: Path, root: Path = ROOT) -> list[str]:
    """Returns underscore names taken from another module of ours, by import or by attribute."""
    errors = []
    tree = parsed(file)
    local_names = set()
    for line, module, name in imported(tree, file, root):
        if module.split(".")[0] not in OURS:
            continue
        parts = [*module.split("."), *([name] if name else [])]
        if any(p.startswith("_") and not p.startswith("__") for p in parts):
            errors.append(f"{file}:{line}: imports the underscore name {'.'.join(parts)}")
        local_names.add(name or module)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and ast.unparse(node.value) in local_names
        ):
            errors.append(f"{file}:{node.lineno}: reads the underscore name {ast.unparse(node)}")
    return errors


# Where names of torch's are replaced: `dcpc/fx/torch_api/`, each with a probe. Public ones may be
# elsewhere.
PATCH_ELSEWHERE = {"dcpc/trace/capture/own_backward.py"}


def patching_errors(file: Path, root: Path = ROOT) -> list[str]:
    """Returns what replaces a name of torch's outside of the folder for that."""
    if file.is_relative_to(root / "dcpc" / "fx" / "torch_api"):
        return []
    tree = parsed(file)
    theirs = {
        (name or module).split(".")[0]
        for _, module, name in imported(tree, file, root)
        if module.split(".")[0] == "torch"
    }
    errors = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            patches = called in ("patch", "patch.object", "patch.dict")
            sets = called in ("setattr", "delattr") and ast.unparse(node.args[0]) in theirs
            if sets or (patches and file.relative_to(root).as_posix() not in PATCH_ELSEWHERE):
                errors.append(f"{file}:{node.lineno}: {called} outside of dcpc/fx/torch_api/")
        for target in node.targets if isinstance(node, ast.Assign | ast.Delete) else []:
            text = ast.unparse(target)
            if isinstance(target, ast.Attribute) and text.split(".")[0] in theirs:
                errors.append(f"{file}:{node.lineno}: writes {text}")
    return errors


def sharing_errors(file: Path, root: Path = ROOT) -> list[str]:
    """Returns imports of a test module, of a benchmark by a test, of tests by a benchmark.

    A test of a benchmark itself (tests/benchmarks/) imports it. What tests share and run
    (`SHARED`) is no test: benchmarks may run the same programs.
    """
    own = file.relative_to(root).parts
    errors = []
    for line, module, name in imported(parsed(file), file, root):
        target = reached(module, name, root).split(".")
        if target[0] == "tests" and target[-1].startswith("test_"):
            errors.append(f"{file}:{line}: imports a test; move what it needs to tests/cases/")
        elif own[0] == "tests" and target[0] == "benchmarks" and own[1] != "benchmarks":
            errors.append(f"{file}:{line}: only tests/benchmarks/ imports a benchmark")
        elif own[0] == "benchmarks" and target[0] == "tests" and target[1:2] not in SHARED:
            errors.append(f"{file}:{line}: a benchmark imports tests")
    return errors


def model_errors(file: Path) -> list[str]:
    return [
        f"{file}:{line}: a model imports {module}"
        for line, module, _ in imported(parsed(file), file)
        if module.split(".")[0] in {*OURS} - {"models"}
    ]


def errors_of(check: Callable[[Path], list[str]], *folders: str) -> str:
    """Returns the errors of all files, a line each: one test, and each offence by name."""
    return "\n".join(error for file in python_files(*folders) for error in check(file))


def test_dcpc_imports_follow_the_table():
    assert errors_of(layering_errors, "dcpc") == ""


def test_dcpc_imports_stand_at_the_top():
    assert errors_of(nested_imports, "dcpc") == ""


def test_importing_dcpc_leaves_torchs_compilers_transformers_and_matplotlib_alone():
    late = {"torch._dynamo", "torch._inductor", "transformers", "accelerate", "matplotlib"}
    code = f"import dcpc.commands.cli, sys; print(sorted({late} & {{*sys.modules}}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_models_import_nothing_of_ours_but_models():
    assert errors_of(model_errors, "models") == ""


def test_no_test_imports_another_test_or_a_benchmark():
    assert errors_of(sharing_errors, "tests", "benchmarks") == ""


def test_no_underscore_name_crosses_modules():
    assert errors_of(private_imports, *OURS) == ""


def test_torch_is_patched_in_one_folder():
    assert not [error for file in python_files("dcpc") for error in patching_errors(file)]


def test_arrows_point_down():
    up = [
        f"{folder}: {unit} imports {target}, which stands above it"
        for folder, rooms in ROOMS.items()
        for n, (unit, may) in enumerate(rooms.items())
        for target in may - set([*rooms][:n])
    ]
    assert not up


def test_every_right_is_used():
    used = {arrow[1:] for file in python_files("dcpc") for arrow in arrows(file)}
    given = {
        (f, unit, to) for f, rooms in ROOMS.items() for unit, may in rooms.items() for to in may
    }
    assert not given - used


def test_table_has_no_room_that_is_not_there():
    places = [(ROOT.joinpath(*f.split("."), unit)) for f, rooms in ROOMS.items() for unit in rooms]
    assert not [place for place in places if not place.is_dir() and not is_file(place)]


def test_no_two_of_one_folder_import_each_other():
    graphs: dict[str, dict[str, set[str]]] = {}
    for file in python_files("dcpc"):
        for _, folder, unit, target in arrows(file):
            graphs.setdefault(folder, {}).setdefault(unit, set()).add(target)
    assert not {folder: found for folder, graph in graphs.items() if (found := circle(graph))}


def test_circles_are_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {"a", "b", "c", "d"}
    assert not circle({"a": {"b", "c"}, "b": {"c"}})


def test_top_of_dcpc_holds_few_modules_and_folders():
    entries = [e for e in (ROOT / "dcpc").iterdir() if e.name not in ALONGSIDE]
    assert {e.stem for e in entries if e.suffix == ".py"} | {"__init__"} == TOP
    assert len([e for e in entries if e.is_dir()]) <= MOST_FOLDERS


def test_class_names_are_unique_and_say_which():
    places: dict[str, list[str]] = {}
    for file in python_files("dcpc"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{file}:{node.lineno}")
    assert len(places) > 300, "classes are found"
    assert not {name: found for name, found in places.items() if len(found) > 1}
    assert not {name: at for name, at in places.items() if name.lstrip("_") in VAGUE}


def test_folders_hold_at_most_twelve():
    folders = {f.parent for f in python_files("dcpc")}
    entries = {f: [e for e in f.iterdir() if e.name not in ALONGSIDE] for f in folders}
    counted = {f: sum(e.is_dir() or e.suffix == ".py" for e in es) for f, es in entries.items()}
    assert not {f: n for f, n in counted.items() if n > MOST_ENTRIES and f != ROOT / "dcpc"}
    without = [f for f in folders if not (f / "__init__.py").is_file()]
    assert not without, "packages are found by their __init__.py"


@pytest.mark.parametrize(
    ("unit", "source", "wrong"),
    [
        ("trace/capture", "from dcpc.buckets import Buckets", 0),
        ("trace/capture", "from dcpc.trace.canonical import random", 0),
        ("trace/capture", "from dcpc.passes.placement import placement", 1),
        ("trace/capture", "import dcpc.codegen", 1),
        ("trace/capture", "from dcpc import codegen", 1),
        ("trace/capture", "from dcpc import compile", 1),
        ("trace/capture", "from dcpc.trace import trace", 1),
        ("trace/capture", "from ... import runtime", 1),
        ("trace/capture", "from ...api import compile", 1),
        ("trace/capture", "from . import factors", 0),
        ("trace/canonical", "from dcpc.trace.capture import dims", 1),
        ("trace/other", "import torch", 1),
        ("passes/masks", "from dcpc.passes.placement import placement", 1),
        ("commands/report", "from dcpc.api import compile", 0),
        ("plan", "from dcpc.api import compile", 1),
    ],
)
def test_layering_errors_hit_and_miss(tmp_path, unit, source, wrong):
    for name in ("trace/canonical", "trace/capture", "passes/placement", "codegen", "runtime"):
        (tmp_path / "dcpc" / name).mkdir(parents=True)
    file = tmp_path / "dcpc" / unit / "some.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    assert len(layering_errors(file, tmp_path)) == wrong


@pytest.mark.parametrize(
    ("place", "source", "wrong"),
    [
        ("tests/fx", "from tests.cases.models import GPT", 0),
        ("tests/fx", "from tests.trace.test_dims import GPT", 1),
        ("tests/fx", "from tests.trace import test_dims", 1),
        ("tests/fx", "from ..trace import test_dims", 1),
        ("tests/fx", "import benchmarks.zoo", 1),
        ("tests/fx", "from benchmarks import zoo", 1),
        ("tests/cases", "from benchmarks.zoo import run", 1),
        ("tests/benchmarks", "from benchmarks.zoo import run", 0),
        ("tests/benchmarks", "from tests.benchmarks.test_zoo import run", 1),
        ("benchmarks", "from tests.fuzz.judge import judge", 0),
        ("benchmarks", "from tests.cases.models import GPT", 0),
        ("benchmarks", "from tests.test_api import GPT", 1),
        ("benchmarks", "import tests", 1),
    ],
)
def test_sharing_errors_hit_and_miss(tmp_path, place, source, wrong):
    for name in ("tests/trace/test_dims.py", f"{place}/some.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    assert len(sharing_errors(tmp_path / place / "some.py", tmp_path)) == wrong


def test_nested_and_private_imports_are_found(tmp_path):
    file = tmp_path / "dcpc" / "some.py"
    file.parent.mkdir()
    file.write_text(
        "from dcpc.ir import _secret, Public\nfrom dcpc import ir\nimport torch\n"
        "ir._more\nir.__name__\ntorch._C\ndef f():\n    import os\n"
    )
    assert len(nested_imports(file, tmp_path)) == 1
    assert [e.split(": ")[1] for e in private_imports(file, tmp_path)] == [
        "imports the underscore name dcpc.ir._secret",
        "reads the underscore name ir._more",
    ]


@pytest.mark.parametrize(
    ("unit", "source", "wrong"),
    [
        ("trace/some", "import torch\ntorch._flag = True", 1),
        ("trace/some", "from torch._export import Verifier\nVerifier.allowed = 1", 1),
        ("trace/some", "from torch import nn\nsetattr(nn, 'x', 1)", 1),
        ("trace/some", "patch.object(x, 'y', 1)", 1),
        ("trace/some", "import torch\ny = torch.ones(1)\ny.grad = None", 0),
        ("trace/some", "setattr(self, 'y', 1)", 0),
        ("fx/torch_api/some", "import torch\ntorch._flag = True", 0),
        ("trace/capture/own_backward", "patch.object(x, 'y', 1)", 0),
    ],
)
def test_patching_errors_hit_and_miss(tmp_path, unit, source, wrong):
    file = tmp_path / "dcpc" / f"{unit}.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert len(patching_errors(file, tmp_path)) == wrong
