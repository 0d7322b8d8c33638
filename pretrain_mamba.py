"""Pretrains hybrid models, under the name of releases before 0.17; see pretrain_hybrid.py."""

if __name__ == "__main__":  # before the imports that take seconds
    from megatron.interrupts import exit_quietly
    from megatron.launcher import end_with_launcher
    from megatron.siblings import notice_siblings

    exit_quietly()
    end_with_launcher()
    notice_siblings()

from megatron.training import pretrain
from megatron.training.providers import Providers
from pretrain_hybrid import DEFAULTS, build_datasets, build_forward_step, build_model

if __name__ == "__main__":
    pretrain(Providers(build_model, build_datasets, build_forward_step), args_defaults=DEFAULTS)
