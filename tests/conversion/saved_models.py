"""Checkpoints of tiny models, saved without a run."""

import zlib
from pathlib import Path

import torch
from torch import nn

from megatron.conversion.model import build_on
from megatron.core.dist_checkpointing.chunk import model_chunks
from megatron.core.dist_checkpointing.writing import save
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.inspection.run_description import describe_run
from megatron.training.trained_model import config_for_one_process
from pretrain_gpt import build_model

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 39"
)
VOCAB_SIZE = 40
LLAMA = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"


def config_of(flags: str, sizes: str = SIZES) -> PretrainConfig:
    return config_for_one_process({"command_line": f"{sizes} {flags}".split()}, [], has_cuda=False)


def build_random(config: PretrainConfig, seed: int = 1, vocab_size: int = VOCAB_SIZE) -> nn.Module:
    """A model on the CPU. Each canonical tensor, norms and biases too, is a random function of its name and `seed`."""
    model = build_on(torch.device("cpu"), config, build_model, vocab_size).eval()
    for chunk in model_chunks(model, lambda info: ()):
        generator = torch.Generator().manual_seed(zlib.crc32(chunk.name.encode()) + seed)
        whole = torch.randn(chunk.global_shape, generator=generator, dtype=torch.float64)
        box = tuple(slice(begin, begin + size) for begin, size in zip(chunk.box.start, chunk.box.shape, strict=True))
        chunk.flat.copy_(whole[box].flatten() * 0.2 + (1.0 if "norm" in chunk.name else 0.0))
    return model


def save_checkpoint(flags: str, root: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """Saves the random model of these flags as iteration 1 under `root`."""
    config = config_of(flags)
    model = build_random(config, vocab_size=vocab_size)
    save(root, model_chunks(model, lambda info: ()), step=1, common={}, config=describe_run(config), layout={})
    return root
