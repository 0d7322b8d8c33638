"""Adapters beside one linear layer, in float64, against their formulas."""

import pytest
import torch
from torch import Tensor, nn

from megatron.core.adapters.attach import add_adapters, answered_targets, check_targets
from megatron.core.adapters.config import LoraConfig
from megatron.core.exceptions import UserError
from megatron.core.parameters import name_parameters
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

IN, OUT = 12, 16


class Lone(nn.Module):
    """A gated first layer of an MLP, alone: rows [2, 8]."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.config = TransformerConfig(
            num_layers=1, hidden_size=IN, num_attention_heads=2, params_dtype=torch.float64, seed=3
        )
        init = self.config.init_method
        assert init is not None
        self.linear_fc1 = ColumnParallelLinear(
            IN, OUT, config=self.config, init_method=init, bias=bias, canonical_shape=(2, OUT // 2), split_dim=1
        )
        name_parameters(self)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.linear_fc1(inputs)[0]
        return output


def adapted(lora: LoraConfig, bias: bool = False) -> tuple[Lone, Tensor]:
    """A layer with adapters whose B (and magnitudes) are random, and inputs."""
    model = Lone(bias)
    add_adapters(model, lora, model.config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) + 0.5)
        if bias:
            model.linear_fc1.bias.copy_(torch.rand(OUT, generator=generator, dtype=torch.float64))
    return model, torch.rand(5, IN, generator=generator, dtype=torch.float64).requires_grad_()


def reference(model: Lone, lora: LoraConfig, inputs: Tensor) -> Tensor:
    """The formula of the module, with whole matrices and autograd."""
    weight = model.linear_fc1.weight.detach()
    delta = torch.zeros_like(weight)
    factor = torch.ones(OUT, dtype=torch.float64)
    names = {"whole": slice(0, OUT), "gate_proj": slice(0, OUT // 2), "up_proj": slice(OUT // 2, OUT)}
    for name, adapter in model.linear_fc1.adapters.named_children():
        rows = names[name]
        change = lora.lora_scale * adapter.lora_b @ adapter.lora_a
        delta = delta.index_add(0, torch.arange(OUT)[rows], change)
        if adapter.magnitude is not None:
            norm = (weight[rows] + change).norm(dim=1).detach()
            factor = factor.index_copy(0, torch.arange(OUT)[rows], adapter.magnitude / norm)
    output = inputs @ (weight + delta).t() * factor
    return output if model.linear_fc1.bias is None else output + model.linear_fc1.bias.detach()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("targets", [["linear_fc1"], ["up_proj"], ["gate_proj", "up_proj"]])
@pytest.mark.parametrize("dora", [False, True])
def test_output_and_gradients(dora: bool, targets: list[str], bias: bool) -> None:
    lora = LoraConfig(lora_rank=3, lora_alpha=5.0, lora_target_modules=targets, use_dora=dora)
    model, inputs = adapted(lora, bias)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == len(targets) * (3 if dora else 2)
    output, expected = model(inputs), reference(model, lora, inputs)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    above = torch.rand(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, wanted = (torch.autograd.grad(value, [inputs, *trained], above) for value in (output, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_outputs_begin_as_those_of_the_frozen_layer() -> None:
    model = Lone()
    inputs = torch.rand(4, IN, dtype=torch.float64)
    before = model(inputs)
    add_adapters(model, LoraConfig(lora_rank=2), model.config)
    assert torch.equal(model(inputs), before) and not model.linear_fc1.weight.requires_grad
    first = model.linear_fc1.adapters.whole.lora_a
    assert first.abs().max() <= IN**-0.5 and first.std() > 0.1


def test_scales() -> None:
    assert LoraConfig(lora_rank=16).lora_scale == 1.0
    assert LoraConfig(lora_rank=16, lora_alpha=8).lora_scale == 0.5
    assert LoraConfig(lora_rank=16, lora_alpha=8, use_rslora=True).lora_scale == 2.0


def test_names_that_no_layer_answers() -> None:
    model = Lone()
    lora = LoraConfig(lora_rank=2, lora_target_modules=["linear_fc1", "linear_qvk"])
    found = answered_targets(model, lora)
    assert found.used == {"linear_fc1"} and found.available == {"linear_fc1"}
    with pytest.raises(UserError, match="no linear layer linear_qvk; it has linear_fc1"):
        check_targets(lora, found.used, found.available)
