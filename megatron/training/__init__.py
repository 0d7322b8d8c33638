"""The app: flags, the loop, logs, checkpoints. The published names work from here."""

from megatron.training.training import pretrain

__all__ = ["pretrain"]
