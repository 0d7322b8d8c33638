"""The settings of low-rank adapters."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.declarations.config_fields import flag, too_small


@dataclass(kw_only=True, frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA: Hu et al. 2021, arXiv:2106.09685). With `lora_rank` the model's own weights stay as they
    are, and a run trains and saves the adapters alone."""

    lora_rank: int | None = None
    """Train low-rank adapters of this rank (LoRA) and leave the model's weights as they are. The weights come from
    --pretrained-checkpoint or --load-hf. Checkpoints contain the adapters alone."""

    lora_alpha: float | None = flag(None, only_with="lora_rank")
    """Scale of the adapters: their output is multiplied by alpha / rank. Default: the rank, a factor of 1."""

    lora_dropout: float = flag(0.0, only_with="lora_rank")
    """Probability with which adapters drop each of their inputs in training."""

    lora_target_modules: list[str] | None = flag(None, nargs="+", only_with="lora_rank", from_checkpoint=True)
    """Linear layers that get an adapter: linear_qkv, linear_proj, linear_fc1, linear_fc2, in_proj, out_proj, other
    linear layers by their names, or q_proj, k_proj, v_proj, gate_proj, up_proj, which give a part of a fused layer an
    adapter of its own. Other names that models of the hub use (o_proj, down_proj, c_attn, ...) work too. Default:
    linear_qkv, linear_proj, linear_fc1 and linear_fc2, those that the model has."""

    use_rslora: bool = flag(False, only_with="lora_rank")
    """Multiply by alpha / sqrt(rank) (rsLoRA: Kalajdzievski 2023, arXiv:2312.03732)."""

    use_dora: bool = flag(False, only_with="lora_rank")
    """Train the norm of each row of an adapted weight separately from its direction (DoRA: Liu et al. 2024,
    arXiv:2402.09353)."""

    lora_base_weights: Literal["model", "nf4"] = flag("model", only_with="lora_rank")
    """Form of the adapted layers' frozen weights in memory. model: the type of the model. nf4: 4 bits and a scale for
    each 64 weights, decoded for each product (QLoRA: Dettmers et al. 2023, arXiv:2305.14314)."""

    @property
    def lora_scale(self) -> float:
        """The factor of the adapters' output."""
        assert self.lora_rank is not None
        alpha = self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return alpha / (math.sqrt(self.lora_rank) if self.use_rslora else self.lora_rank)

    def validate(self) -> Iterator[str]:
        """Yields a problem for each impossible value, in the grammar of `config_fields`."""
        yield from too_small(self, ("lora_rank",), 1)
        if self.lora_alpha is not None and not self.lora_alpha > 0:
            yield "{lora_alpha} must be larger than 0"
        if not 0.0 <= self.lora_dropout < 1.0:
            yield "{lora_dropout} must be at least 0 and less than 1"
