"""The rules of the house (CONTRIBUTING.md), read from the source by `ast`."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

import encoders
import serve_app
from encoders import EncoderConfig

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES: list[str] = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
FILES = sorted(chain.from_iterable((ROOT / package).rglob("*.py") for package in PACKAGES))
CONFIGS = sorted((ROOT / "configs" / "encoders").glob("*.yaml"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))

MAX_FILE_LINES = 250
MAX_FUNCTION_LINES = 60
SHORT_FUNCTION_LINES = 25
SHORT_FUNCTIONS = 0.9
MAX_OWN_IMPORTS = 7
MAX_BROAD_EXCEPTS = 2

OUTER_WORLD = {"ray", "fastapi", "starlette", "serve_app"}
WITHOUT_TORCH = [  # light ones first: the first that brings torch along is named
    "encoders",
    "encoders.config",
    "encoders.packing",
    "encoders.sizes",
    "encoders.image",
    "serve_app.batcher",
    "serve_app.ingress",
    "serve_app.handles",
]
BASES = {
    "nn.Module",
    "Exception",
    "EncoderError",
    "ConfigError",
    "RequestError",
    "Enum",
    "BaseModel",
    "Settings",
    "NamedTuple",
    "Protocol",
}
READS_OF_VALUES = {"item", "tolist", "nonzero"}
# (file, function, call) -> why it cannot stall a device.
ALLOWED_READS = {
    ("encoders/attention.py", "sdpa", "tolist"): "the Encoder keeps sdpa's boundaries on the host",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse(file: Path) -> ast.Module:
    """The syntax tree of one file."""
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def relative(file: Path) -> str:
    """The file's path inside the repository."""
    return file.relative_to(ROOT).as_posix()


def module_name(file: Path) -> str:
    """`encoders/towers/__init__.py` -> `encoders.towers`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {file: parse(file) for file in FILES}
MODULES = {module_name(file) for file in FILES}


def imported(tree: ast.Module) -> set[str]:
    """Every module that a file imports, at the top or in a function, by its full name."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            full_names = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else str(node.module) for name in full_names}
    return names


def scoped(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node with the qualified name of the function or class that it stands in or makes."""
    for node in ast.iter_child_nodes(tree):
        name = outer
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{outer}.{node.name}".lstrip(".")
        yield name, node
        yield from scoped(node, name)


def mentions(tree: ast.AST, dotted: str) -> bool:
    """Whether a file names something, by a path that ends so, or imports it."""
    return any(
        (isinstance(node, ast.Attribute) and f".{ast.unparse(node)}".endswith(f".{dotted}"))
        or (
            isinstance(node, ast.ImportFrom)
            and any(f".{node.module}.{a.name}".endswith(f".{dotted}") for a in node.names)
        )
        for node in ast.walk(tree)
    )


def length(function: Function) -> int:
    """Lines from `def` to the last statement; decorators do not count."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_both_packages_are_read() -> None:
    assert {"encoders.encoder", "serve_app.app"} <= MODULES
    assert CONFIGS


def test_imports_have_no_cycle() -> None:
    graph = {module_name(file): imported(tree) & MODULES for file, tree in TREES.items()}

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_encoders_knows_nothing_of_serving() -> None:
    strays = [
        f"{relative(file)}: {name}"
        for file, tree in TREES.items()
        if module_name(file).split(".")[0] == "encoders"
        for name in sorted(imported(tree))
        if name.split(".")[0] in OUTER_WORLD
    ]

    assert strays == []


def test_ingress_and_batcher_start_without_torch() -> None:
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", script, *WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True
    )

    assert result.returncode == 0, result.stderr


def test_deployments_are_made_in_app_alone() -> None:
    makers = [relative(file) for file, tree in TREES.items() if mentions(tree, "serve.deployment")]

    assert makers == ["serve_app/app.py"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_encoder_loads_by_its_file_name(path: Path) -> None:
    config = EncoderConfig.load(path.stem)

    assert config.name == path.stem


def test_the_door_of_encoders_is_sorted_and_complete() -> None:
    (tree,) = (tree for file, tree in TREES.items() if module_name(file) == "encoders")
    public = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert encoders.__all__ == sorted(encoders.__all__)
    assert set(encoders.__all__) == public


def test_files_keep_to_their_ceiling() -> None:
    lengths = {relative(file): len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}

    assert {file: lines for file, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_keep_to_their_ceiling() -> None:
    lengths = {
        f"{relative(file)}: {name}": length(function)
        for file, tree in TREES.items()
        for name, function in scoped(tree)
        if isinstance(function, Function)
    }
    long = {name: lines for name, lines in lengths.items() if lines > SHORT_FUNCTION_LINES}

    assert {name: lines for name, lines in long.items() if lines > MAX_FUNCTION_LINES} == {}
    assert len(long) <= (1 - SHORT_FUNCTIONS) * len(lengths), long


def test_a_file_imports_few_of_our_own_modules() -> None:
    own = {relative(file): sorted(imported(tree) & MODULES) for file, tree in TREES.items()}

    assert {file: names for file, names in own.items() if len(names) > MAX_OWN_IMPORTS} == {}


def test_broad_excepts_are_few_and_none_is_bare() -> None:
    handlers = [
        (f"{relative(file)}:{node.lineno}", node.type)
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
    ]
    bare = [place for place, caught in handlers if caught is None]
    broad = [
        place
        for place, caught in handlers
        if caught and {"Exception", "BaseException"} & set(re.findall(r"\w+", ast.unparse(caught)))
    ]

    assert bare == []
    assert len(broad) <= MAX_BROAD_EXCEPTS, broad


def test_classes_inherit_from_the_listed_bases_alone() -> None:
    strays = {
        f"{relative(file)}: {node.name}({ast.unparse(base)})"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if ast.unparse(base) not in BASES
    }

    assert strays == set()


def test_annotations_in_serve_app_stay_objects() -> None:
    # With them as strings, Serve hands the app's builder a plain dict, unchecked.
    strays = [
        relative(file)
        for file, tree in TREES.items()
        if module_name(file).split(".")[0] == "serve_app" and "__future__" in imported(tree)
    ]

    assert strays == []


def test_encoders_reads_no_values_back_from_a_device() -> None:
    reads = {
        (relative(file), function, node.func.attr)
        for file, tree in TREES.items()
        if module_name(file).split(".")[0] == "encoders"
        for function, node in scoped(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in READS_OF_VALUES
    }

    assert reads - ALLOWED_READS.keys() == set()
    assert ALLOWED_READS.keys() - reads == set(), "allowed, but gone from the code"


def test_nothing_synchronises_the_whole_device() -> None:
    strays = [relative(file) for file, tree in TREES.items() if mentions(tree, "cuda.synchronize")]

    assert strays == []


def test_the_changelog_begins_with_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    versions = re.findall(r"^## \[(\d[^\]]*)\] - \d{4}-\d{2}-\d{2}$", changelog, re.MULTILINE)

    assert versions[0] == serve_app.__version__


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=relative)
def test_relative_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    paths = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)]

    assert [path for path in paths if not (page.parent / path).exists()] == []
