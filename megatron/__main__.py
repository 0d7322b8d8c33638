"""Runs an entry script or a tool:   python -m megatron PROGRAM ...; see megatron.programs."""

import sys

from megatron.programs import run

if __name__ == "__main__":
    run(sys.argv[1:])
