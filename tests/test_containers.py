"""Recipes of images: their pins are within the ranges of pyproject.toml, and hadolint finds nothing in them."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPES = sorted((ROOT / "containers").glob("*.Dockerfile"))
OF_IMAGES = ("training", "hf", "sft", "parquet")
PINS = dict(line.split("==") for line in (ROOT / "containers/constraints.txt").read_text().splitlines() if "==" in line)


def test_every_pin_is_in_the_range_that_the_package_asks_for() -> None:
    wanted = [
        *PROJECT["dependencies"],
        *(each for extra in OF_IMAGES for each in PROJECT["optional-dependencies"][extra]),
    ]
    for requirement in map(Requirement, wanted):
        pin = PINS[re.sub(r"[-_.]+", "-", requirement.name).lower()]
        assert requirement.specifier.contains(pin), f"{requirement}, pinned to {pin}; run containers/pins.py"
    assert all(re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?", version) for version in PINS.values())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_images_install_the_pinned_torch_and_extras_that_exist(recipe: Path) -> None:
    text = recipe.read_text()
    assert f"ARG TORCH_VERSION={PINS['torch']}\n" in text
    extras = set(re.findall(r"\.whl\)\[([\w,]+)\]", text)[0].split(","))
    assert set(OF_IMAGES) <= extras <= PROJECT["optional-dependencies"].keys()


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (extra release)")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_hadolint_finds_nothing(recipe: Path) -> None:
    done = subprocess.run(["hadolint", str(recipe)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_slurm_script_is_shell_and_its_flags_exist() -> None:
    from megatron.training.config.flag_table import flags_by_spelling

    script = ROOT / "containers/slurm.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], timeout=60).returncode == 0
    run = script.read_text().partition("megatron-pretrain gpt")[2]
    flags = re.findall(r"--[a-z][\w-]*", run)
    assert len(flags) > 15 and set(flags) <= flags_by_spelling().keys()
