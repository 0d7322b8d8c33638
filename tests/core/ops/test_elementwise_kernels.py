"""Triton kernels of norms, positions, biases and updates against their definitions, by Triton's interpreter."""

import os
import subprocess
import sys


def test_triton_kernels_equal_their_definitions() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "support.elementwise_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "agree\n", done.stderr
