"""A model in half precision."""

import torch
from support.tiny_models import tiny_config, tiny_gpt

from megatron.core.transformer.module import Float16Module, convert


def test_float16_module() -> None:
    half = tiny_config(fp64=False, bf16=True)
    wrapped = Float16Module(half, tiny_gpt(tiny_config(fp64=False)))
    assert {parameter.dtype for parameter in wrapped.parameters()} == {torch.bfloat16}
    assert all(hasattr(parameter, "info") for parameter in wrapped.parameters())
    assert wrapped.state_dict().keys() == tiny_gpt(tiny_config()).state_dict().keys()
    ids = torch.arange(10).view(2, 5)
    assert wrapped(ids).dtype is torch.float32 and wrapped(ids, fp32_output=False).dtype is torch.bfloat16
    assert wrapped(ids, labels=ids).dtype is torch.float32
    wrapped.load_state_dict(tiny_gpt(tiny_config(seed=3)).state_dict())
    assert torch.equal(
        wrapped.module.decoder.layers[0].mlp.linear_fc1.weight.float().bfloat16(),
        tiny_gpt(tiny_config(seed=3)).decoder.layers[0].mlp.linear_fc1.weight.bfloat16(),
    )


def test_casts_reach_floating_tensors_in_nests_alone() -> None:
    ids, x = torch.arange(3), torch.ones(3)
    found = convert(((ids, [x, None]), "word"), lambda tensor: tensor.half())
    assert found[0][0] is ids and found[0][1][0].dtype is torch.half
    assert found[0][1][1] is None and found[1] == "word"
