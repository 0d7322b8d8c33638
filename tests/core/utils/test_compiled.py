"""megatron/core/datasets/compiled.py: nothing is imported before it is needed; read-only folders do not stop it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import megatron.core.utils.compiled as module
from megatron.core.utils.compiled import compiled

KERNEL = """
import sys
from compiled import compiled

@compiled
def total(n: int) -> int:
    found = 0
    for i in range(n):
        found += i
    return found

assert "numba" not in sys.modules
assert total(10) == 45 and total(11) == 55
assert "numba" in sys.modules
"""


def test_importing_the_datasets_leaves_numba_alone():
    code = (
        "import sys; import megatron.core.datasets.blended_megatron_dataset_builder;"
        "import megatron.core.datasets.gpt_dataset; assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_function_keeps_its_name():
    @compiled
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert double(4) == 8


def test_an_installation_without_any_place_for_machine_code(tmp_path):
    shutil.copy(Path(module.__file__), tmp_path / "compiled.py")
    (tmp_path / "kernel.py").write_text(KERNEL)
    # Files where folders should be: nobody can write there, superusers included.
    (tmp_path / "__pycache__").write_text("")
    (tmp_path / "home").write_text("")
    environment = {"HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    command = [sys.executable, "kernel.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
