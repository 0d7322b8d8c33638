"""Checkpoints that Megatron-LM wrote, in tests/data/golden/torch_dist, and the flags of their models.

gpt2style_optim and llamastyle_distopt_fully_reshardable are of release 0.16.1, after one step of Adam in float32. The
moe_* ones are of release 0.19.2, after two steps in bfloat16: one state, saved in two formats of torch_dist, and in the
legacy format.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "torch_dist"

_SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
_NULL = "--tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 4"
_LLAMA = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights "
    "--position-embedding-type rope"
)
GPT2 = f"{_SIZES} {_NULL} --vocab-size 127"
LLAMA = f"{GPT2} {_LLAMA} --group-query-attention --num-query-groups 2 --ffn-hidden-size 176"
MOE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    f"{_NULL} {_LLAMA} "
    "--vocab-size 39 --ffn-hidden-size 64 --bf16 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8 "
    "--moe-layer-freq [0,1] --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
    "--moe-shared-expert-intermediate-size 8"
)
FLAGS = {
    "gpt2style_optim": GPT2,
    "llamastyle_distopt_fully_reshardable": LLAMA,
    "moe_dp_reshardable": MOE,
    "moe_fully_reshardable": MOE,
    "moe_legacy": MOE,
}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of one of our checkpoints, which must consist of whole tensors."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
