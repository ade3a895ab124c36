"""The rules that keep the package readable: who imports whom, sizes, no private names of others."""

import ast
import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "jaxgpt"
FILES = sorted(PACKAGE.rglob("*.py"))

# Imports run downward only: a room takes from rooms on lines above its own.
ORDER = """
    config
    cluster
    runtime
    kernels
    parallel
    models
    optim
    data
    perf
    tracking
    checkpoint
    convert
    spikes
    train
    plan doctor sample inspect evaluate prepare launch replay
    report
    bench
    __main__
"""
LEVEL = {room: level for level, line in enumerate(ORDER.split("\n")) for room in line.split()}
JAX_INTERNALS = "runtime/jax_internals.py"  # the one file that may use private names of packages
MAX_FILE, MAX_FUNCTION, MAX_ROOM = 350, 60, 10  # lines, lines, files

# What does not keep a rule yet. An exception that is not needed any more fails its test: delete it.
UPWARD = set()
JAX_IN_CLUSTER = set()
PRIVATE = set()
EXITS = set()
GLOBALS = set()
LONG_FILES = set()
LONG_FUNCTIONS = set()
LARGE_ROOMS = set()


def name_of(file):
    """Return the path of a file in the package, as in "train/step.py"."""
    return str(file.relative_to(PACKAGE))


def room_of(file):
    return name_of(file).partition("/")[0].removesuffix(".py")


def nodes(file, *kinds):
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]


def imported(file):
    """Return the modules that a file imports, also inside functions: "jax.numpy", "os.path"."""
    out = {alias.name for node in nodes(file, ast.Import) for alias in node.names}
    for node in nodes(file, ast.ImportFrom):
        assert node.level == 0, f"{name_of(file)}:{node.lineno}: write the package's name"
        out |= {f"{node.module}.{alias.name}" for alias in node.names}
    return out


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def private_names(file):
    """Return the private names of packages, and of other files of this one, that a file uses."""
    out = {name for name in imported(file) if any(map(is_private, name.split(".")))}
    packages = {
        alias.asname or alias.name.partition(".")[0]
        for node in nodes(file, ast.Import, ast.ImportFrom)
        for alias in node.names
    }
    for node in nodes(file, ast.Attribute):
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if is_private(node.attr) and isinstance(root, ast.Name) and root.id in packages:
            out.add(ast.unparse(node))
    return out - {"os._exit"}  # which is public, and has a test of its own


def test_rooms_import_downward_only():
    upward = {
        f"{name_of(file)} -> {module}"
        for file in FILES
        for module in imported(file)
        if module.startswith("jaxgpt.")
        and (room := module.split(".")[1]) in LEVEL
        and room != room_of(file)
        and LEVEL[room] >= LEVEL.get(room_of(file), 0)
    }
    assert upward == UPWARD


def test_every_room_has_its_place_in_the_order():
    assert {room_of(file) for file in FILES} - {"__init__"} <= set(LEVEL)


def test_config_and_cluster_do_not_import_jax():
    packages = {"jax", "jaxlib", "flax", "optax", "orbax"}
    found = {
        f"{name_of(file)}: {name}"
        for file in FILES
        if room_of(file) in ("config", "cluster")
        for name in imported(file)
        if name.partition(".")[0] in packages
    }
    assert found == JAX_IN_CLUSTER


def test_private_names_of_packages_stand_in_one_file():
    found = {f"{name_of(f)}: {name}" for f in FILES for name in private_names(f)}
    assert {line for line in found if not line.startswith(JAX_INTERNALS)} == PRIVATE


def test_one_file_ends_the_process():
    found = {name_of(f) for f in FILES if "os._exit(" in f.read_text()}
    assert found == {"cluster/shutdown.py"} | EXITS


def test_no_function_changes_a_global():
    assert {name_of(file) for file in FILES if nodes(file, ast.Global)} == GLOBALS


def test_files_are_short():
    long = {name_of(f) for f in FILES if len(f.read_text().splitlines()) > MAX_FILE}
    assert long == LONG_FILES


def test_functions_are_short():
    long = {
        f"{name_of(file)}: {node.name}"
        for file in FILES
        for node in nodes(file, ast.FunctionDef, ast.AsyncFunctionDef)
        if node.end_lineno - node.lineno + 1 > MAX_FUNCTION
    }
    assert long == LONG_FUNCTIONS


def test_rooms_are_small():
    sizes = Counter(name_of(f.parent) for f in FILES if f.name != "__init__.py")
    assert {room for room, size in sizes.items() if size > MAX_ROOM and room != "."} == LARGE_ROOMS


def test_a_training_step_reads_briefly():
    _, _, text = (PACKAGE / "train/README.md").read_text().partition("in this order:")
    names = re.findall(r"`([a-z_/]+\.py)`", text.partition("One call further")[0])
    assert "train/step.py" in names and len(names) <= 6
    assert sum(len((PACKAGE / name).read_text().splitlines()) for name in names) <= 900
    functions = nodes(PACKAGE / "train/step.py", ast.FunctionDef)
    (step,) = (node for node in functions if node.name == "train_step")
    assert step.end_lineno - step.lineno + 1 <= 40
