"""The import table of DESIGN section 2, enforced by reading the source of every module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("dcpc", "models", "benchmarks", "examples", "tests")

GROUND = {
    *("errors", "yaml_lines", "specs", "buckets", "ir", "random_ops", "attention", "repeats"),
    *("garbage", "leaves", "fakes", "integers", "writes", "module_state"),
}
PHASES = {"trace", "symbolic_profile", "passes", "codegen", "runtime"}
# unit of dcpc (module or folder) -> the other units it may import
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "yaml_lines": {"errors"},
    "specs": {"errors"},
    "random_ops": set(),
    "attention": set(),
    "repeats": set(),
    "garbage": set(),
    "leaves": {"errors"},
    "fakes": {"leaves", "errors"},
    "module_state": set(),
    "integers": {"errors"},
    "writes": {"errors"},
    "buckets": {"errors", "yaml_lines", "specs"},
    "ir": GROUND - {"ir", "random_ops", "attention", "repeats", "garbage", "module_state"},
    **{phase: GROUND for phase in PHASES},
    "passes": GROUND | {"symbolic_profile"},
    "progress": set(),
    "source": GROUND,
    "masks": GROUND | PHASES,
    "folding": GROUND | PHASES,
    "studies": GROUND | PHASES | {"folding"},
    "placements": GROUND | PHASES | {"folding"},
    "variants": GROUND | PHASES | {"folding", "studies", "placements"},
    "attention_report": GROUND | PHASES | {"variants"},
    "planning": GROUND
    | PHASES
    | {"placements", "variants", "source", "progress", "attention_report"},
    "page": GROUND | PHASES | {"planning", "variants"},
    "factories": {"errors"},
    "acceptance": GROUND | PHASES | {"masks", "variants", "factories"},
    "verify": GROUND | PHASES | {"acceptance", "variants", "planning"},
    "following": GROUND | PHASES | {"planning"},
    "compiled": GROUND | PHASES | {"variants", "planning", "following", "verify"},
    "api": GROUND
    | PHASES
    | {"masks", "placements", "variants", "planning", "following", "compiled", "progress"}
    | {"verify"},
    "__init__": GROUND | PHASES | {"api", "compiled"},
    "calibrate": GROUND
    | PHASES
    | {"acceptance", "api", "compiled", "factories", "following", "masks", "options", "variants"},
    "options": PHASES | {"errors"},
    "simulate": GROUND | PHASES | {"planning", "variants"},
    "cli": GROUND
    | PHASES
    | {"acceptance", "api", "calibrate", "compiled", "factories", "planning", "simulate"}
    | {"options", "variants", "page", "progress"},
    "__main__": {"cli"},
}


def module_name(file: Path, root: Path = ROOT) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


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


def unit_of(module: str, name: str | None, root: Path = ROOT) -> str | None:
    """Returns the unit of dcpc that `from module import name` reaches, None outside of dcpc."""
    parts = module.split(".")
    if parts[0] != "dcpc":
        return None
    if len(parts) > 1:
        return parts[1]
    path = root / "dcpc" / (name or "")
    return name if name and (path.is_dir() or path.with_suffix(".py").is_file()) else "__init__"


def layering_errors(file: Path, root: Path = ROOT) -> list[str]:
    unit = file.relative_to(root / "dcpc").with_suffix("").parts[0]
    if unit not in ALLOWED:
        return [f"{file}: unit '{unit}' is not in the table of tests/test_layering.py; add it"]
    tree = ast.parse(file.read_text())
    errors = []
    for line, module, name in imported(tree, file, root):
        target = unit_of(module, name, root)
        if target is not None and target != unit and target not in ALLOWED[unit]:
            errors.append(f"{file}:{line}: {unit} imports {target}; may: {sorted(ALLOWED[unit])}")
    return errors


def nested_imports(file: Path) -> list[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return [
        f"{file}:{node.lineno}: import inside a function; move it to the top"
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, functions)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def private_imports(file: Path, root: Path = ROOT) -> list[str]:
    """Returns underscore names taken from another module of ours, by import or by attribute."""
    errors = []
    tree = ast.parse(file.read_text())
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
            and ast.unparse(node.value) in local_names
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ):
            errors.append(f"{file}:{node.lineno}: reads the underscore name {ast.unparse(node)}")
    return errors


@pytest.mark.parametrize("file", python_files("dcpc"), ids=module_name)
def test_dcpc_imports_follow_the_table(file):
    assert not layering_errors(file)


@pytest.mark.parametrize("file", python_files("dcpc"), ids=module_name)
def test_dcpc_imports_stand_at_the_top(file):
    assert not nested_imports(file)


@pytest.mark.parametrize("file", python_files("models"), ids=module_name)
def test_models_import_nothing_of_ours_but_models(file):
    for line, module, _ in imported(ast.parse(file.read_text()), file):
        top = module.split(".")[0]
        assert top not in OURS or top == "models", f"{file}:{line}: a model imports {module}"


@pytest.mark.parametrize("file", python_files(*OURS), ids=module_name)
def test_no_underscore_name_crosses_modules(file):
    assert not private_imports(file)


def test_table_is_acyclic():
    done: set[str] = set()
    while ready := {u for u, may in ALLOWED.items() if u not in done and may <= done}:
        done |= ready
    assert done == set(ALLOWED)


@pytest.mark.parametrize(
    ("unit", "source", "wrong"),
    [
        ("passes", "from dcpc.symbolic_profile import cost", 0),
        ("trace", "from dcpc.buckets import Buckets", 0),
        ("trace", "from dcpc.passes.placement import place", 1),
        ("trace", "import dcpc.codegen", 1),
        ("trace", "from dcpc import codegen", 1),
        ("trace", "from dcpc import compile", 1),
        ("trace", "from .. import runtime", 1),
        ("trace", "from ..api import compile", 1),
        ("trace", "from . import factors", 0),
        ("cli", "from dcpc.api import compile", 0),
        ("errors", "from dcpc.ir import Program", 1),
    ],
)
def test_layering_errors_hit_and_miss(tmp_path, unit, source, wrong):
    for phase in PHASES:
        (tmp_path / "dcpc" / phase).mkdir(parents=True)
    file = tmp_path / "dcpc" / (f"{unit}/some.py" if unit in PHASES else f"{unit}.py")
    file.write_text(source)
    assert len(layering_errors(file, tmp_path)) == wrong


def test_nested_and_private_imports_are_found(tmp_path):
    file = tmp_path / "dcpc" / "some.py"
    file.parent.mkdir()
    file.write_text(
        "from dcpc.ir import _secret, Public\nfrom dcpc import ir\nimport torch\n"
        "ir._more\nir.__name__\ntorch._C\ndef f():\n    import os\n"
    )
    assert len(nested_imports(file)) == 1
    assert [e.split(": ")[1] for e in private_imports(file, tmp_path)] == [
        "imports the underscore name dcpc.ir._secret",
        "reads the underscore name ir._more",
    ]
