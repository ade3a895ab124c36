"""Rules that keep the package readable.

They are about import order, private names, dependencies, one exit point and global variables.
"""

import ast
import re
import tomllib
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "jaxgpt"
FILES = sorted(PACKAGE.rglob("*.py"))

# Code imports only from lower layers, which are listed above its own.
ORDER = """
    config
    cluster
    runtime
    kernels
    parallel
    data
    models
    optim
    perf
    tracking
    checkpoint
    convert
    spikes
    train
    evaluate
    library
    plan doctor sample inspect prepare launch replay
    report
    bench
    __init__ __main__
"""
LEVEL = {room: level for level, line in enumerate(ORDER.split("\n")) for room in line.split()}
JAX_INTERNALS = "runtime/jax_internals.py"  # the one file that may use private names of packages


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
    found = {
        f"{name_of(file)} -> {module}"
        for file in FILES
        for module in imported(file)
        if module.startswith("jaxgpt.")
        and (room := module.split(".")[1]) in LEVEL
        and room != room_of(file)
        and LEVEL[room] >= LEVEL[room_of(file)]
    }
    assert not found


def test_every_room_has_its_place_in_the_order():
    assert {room_of(file) for file in FILES} <= set(LEVEL)


def test_config_and_cluster_do_not_import_jax():
    packages = {"jax", "jaxlib", "flax", "optax", "orbax"}
    found = {
        f"{name_of(file)}: {name}"
        for file in FILES
        if room_of(file) in ("config", "cluster")
        for name in imported(file)
        if name.partition(".")[0] in packages
    }
    assert not found


def test_every_dependency_is_imported():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    # A package may differ in name from the module that it provides: PyYAML provides `yaml`.
    providers = metadata.packages_distributions()
    modules = {name.partition(".")[0] for file in FILES for name in imported(file)}
    packages = {name.lower() for module in modules for name in providers.get(module, [])}
    dependencies = {re.match(r"[\w.-]+", line)[0] for line in project["dependencies"]}
    assert not {name for name in dependencies if name.lower() not in packages}


def test_private_names_of_packages_stand_in_one_file():
    found = {f"{name_of(f)}: {name}" for f in FILES for name in private_names(f)}
    assert not {line for line in found if not line.startswith(JAX_INTERNALS)}


def test_one_file_ends_the_process():
    found = {name_of(f) for f in FILES if "os._exit(" in f.read_text()}
    assert found == {"cluster/shutdown.py"}


def test_no_function_changes_a_global():
    assert not {name_of(file) for file in FILES if nodes(file, ast.Global)}
