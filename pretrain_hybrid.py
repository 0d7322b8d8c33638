"""Pretrains hybrid models:   torchrun --nproc_per_node 8 pretrain_hybrid.py --hybrid-layer-pattern M-M*- ...

The run is that of pretrain_gpt.py with `--is-hybrid-model`: without a pattern all layers are Mamba-2 layers.
"""

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly
    from megatron.launcher import end_with_launcher
    from megatron.siblings import notice_siblings

    exit_quietly()
    end_with_launcher()
    notice_siblings()

from megatron.facades.pretrain import pretrain
from megatron.training.providers import Providers
from pretrain_gpt import build_datasets, build_forward_step, build_model

DEFAULTS = {"model_family": "gpt", "is_hybrid_model": True}

if __name__ == "__main__":
    pretrain(Providers(build_model, build_datasets, build_forward_step), args_defaults=DEFAULTS)
