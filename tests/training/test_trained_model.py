"""A model as a run in any layout saved it, for use in one process."""

import pytest

from megatron.training.trained_model import _for_one_process

LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --use-megatron-fsdp "
    "--pipeline-model-parallel-layout Et|tL --context-parallel-size 2 --cp-comm-type a2a+p2p "
    "--hierarchical-context-parallel-sizes 1 2 --num-distributed-optimizer-instances 2 --recompute-granularity full "
    "--pipeline-schedule zb-v --use-torch-fsdp2"
)
MODEL = "--num-layers 2 --hidden-size 32 --untie-embeddings-and-output-weights --data-path a b"


@pytest.mark.parametrize(
    ("line", "half", "left"),
    [
        (f"--seq-length 8 {LAYOUT} {MODEL} --bf16", True, f"--seq-length 8 {MODEL} --bf16"),
        (f"{MODEL} --bf16 {LAYOUT}", False, MODEL),
        (f"{LAYOUT} --fp64 {MODEL} --of-another-release 1", False, f"--fp64 {MODEL} --of-another-release 1"),
    ],
)
def test_the_flags_of_a_layout_are_left_out(line, half, left):
    assert _for_one_process(line.split(), half=half) == left.split()
