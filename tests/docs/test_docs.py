"""What the README and the docs show is run as it stands there."""

from __future__ import annotations

import re
import shlex
import struct

import pytest
import yaml

from lit_parallel.data.idx import FILES, read_split
from lit_parallel.schedules import available_algorithms
from tests.scripts import ROOT, run, run_in_child

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("[!_]*.md"))]
PAGES = [page for page in PAGES if not any(part.startswith("_") for part in page.relative_to(ROOT).parts)]


def blocks(language):
    return [
        pytest.param(block, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, block in enumerate(re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S))
    ]


COMMANDS = sorted({line.split("  #")[0].strip() for block in blocks("bash") for line in block.values[0].splitlines()})
QUICK = "--accelerator cpu --epochs 1 --limit-train-batches 2"


@pytest.mark.parametrize("block", blocks("python"))
def test_python_blocks_run(tmp_path, block):
    (tmp_path / "block.py").write_text(block)
    result = run_in_child(tmp_path / "block.py", tmp_path, warnings="default")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("block", blocks("yaml"))
def test_yaml_blocks_are_valid(block):
    assert yaml.safe_load(block)


@pytest.fixture(scope="module")
def few_images(tmp_path_factory):
    """A part of the small set, for commands that need no more than any images."""
    folder = tmp_path_factory.mktemp("images")
    for split, count in (("train", 300), ("test", 100)):
        images, labels = read_split(ROOT / "recipes" / "data", split)
        for name, values in zip(FILES[split], (images[:count, 0], labels[:count].byte()), strict=True):
            header = struct.pack(f">4B{values.dim()}I", 0, 0, 8, values.dim(), *values.shape)
            (folder / name).write_bytes(header + values.numpy().tobytes())
    return folder


@pytest.mark.parametrize("command", [command for command in COMMANDS if "recipes/" in command])
def test_recipe_commands_run(tmp_path, few_images, command):
    python, recipe, *flags = shlex.split(command)
    assert python == "python"
    if "--help" not in flags:
        flags += ["--data-dir", str(few_images), "--epochs", "1"]
        flags += QUICK.split() if "fashion_mnist" in recipe else []
    result = run(ROOT / recipe, tmp_path, *flags, warnings="default")
    assert result.returncode == 0, result.stderr


def test_other_commands_are_modules_or_targets_of_the_makefile():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    modules = ("lit_parallel.benchmark", "lit_parallel.parameter_server")  # run by their own tests
    for command in COMMANDS:
        words = command.split()
        if "recipes/" not in command and not any(module in words for module in modules):
            assert words[0] == "make"
            assert words[1] in targets


def test_the_readme_names_every_strategy():
    text = (ROOT / "README.md").read_text()
    for name in (*available_algorithms(), "ps_ssp", "ps_async", "dp", "single", "ddp"):
        assert f'`"{name}"`' in text


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+\.(?:md|json|png))[^)]*\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"
