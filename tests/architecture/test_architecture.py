from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest

import lit_parallel
from lit_parallel.schedules import available_algorithms, get_algorithm

PACKAGE = Path(lit_parallel.__file__).parent
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(PACKAGE)], "lit_parallel.")
    if not module.name.endswith("__main__")
)
#: Files of lit_parallel/schedules that are no algorithm.
MACHINERY = {"__init__", "cost", "pipeline", "progress", "registry", "schedule", "verify"}


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


def test_every_algorithm_file_is_registered():
    files = {path.stem for path in (PACKAGE / "schedules").glob("*.py")} - MACHINERY
    registered = {get_algorithm(name).make_schedule.__module__.rsplit(".", 1)[1] for name in available_algorithms()}
    assert registered == files


def test_schedules_are_pure_python_and_short():
    for path in (PACKAGE / "schedules").glob("*.py"):
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert roots <= {"lit_parallel", *sys.stdlib_module_names}, path
        if path.stem not in MACHINERY:
            assert len(path.read_text().splitlines()) <= 70, path


@pytest.mark.parametrize("folder", ["schedules", "transports"])
def test_the_core_does_without_lightning(folder):
    for path in (PACKAGE / folder).rglob("*.py"):
        assert not any(name.split(".")[0] == "lightning" for name in imports_of(path)), path


@pytest.mark.parametrize("name", ["lit_parallel", *MODULES])
def test_public_names_exist_and_are_sorted(name):
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None)
    if public is not None:
        assert all(hasattr(module, each) for each in public)
        assert sorted(public) == sorted(set(public))


def test_every_folder_says_what_it_offers():
    for path in PACKAGE.rglob("__init__.py"):
        assert "__all__" in path.read_text(), path
