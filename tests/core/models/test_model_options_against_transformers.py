"""Every family of model options against tiny random models of `transformers`, in float64: logits and gradients.

The models are those of `support.model_option_cases`.
"""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from support.model_option_cases import CASES, COMMON, LAYERS, THEIR_LAYERS, THEIRS, VOCABULARY, Case
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH = 24


class NothingNarrower(TorchFunctionMode):
    """Where a model computes norms, softmax or rotations in float32 for a model of any type, float64 stays float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wide = bool(args) and isinstance(args[0], Tensor) and args[0].dtype is torch.float64
        if wide and function is Tensor.float:
            return args[0]
        if wide and function is Tensor.to and torch.float32 in (*args[1:], kwargs.get("dtype")):
            return args[0]
        if wide and kwargs.get("dtype") is torch.float32:
            del kwargs["dtype"]
        if function is torch.polar:  # whose cosines differ in the last bit
            return torch.complex(args[0] * args[1].cos(), args[0] * args[1].sin())
        return function(*args, **kwargs)


def theirs_of(case: Case) -> torch.nn.Module:
    torch.manual_seed(0)
    settings = {**THEIRS, **case.theirs}
    if case.kind == "Falcon":
        del settings["head_dim"]
    if case.kind in ("GptOss", "Qwen3Next"):
        settings["experts_implementation"] = "eager"
    kind = {"Gemma3": "Gemma3Text", "Llama4": "Llama4Text"}.get(case.kind, case.kind)
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, f"{case.kind}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
    for module in model.modules():  # angles are float32, in theirs as in ours
        for key, value in module.named_buffers(recurse=False):
            if key.endswith("inv_freq"):
                module.register_buffer(key, value.float(), persistent=False)
    return model


def ours_of(case: Case) -> GPTModel:
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fp64": True, "use_cpu_initialization": True}
    config = TransformerConfig(num_layers=LAYERS, **{**COMMON, **plain, **case.ours})
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = {"position_embedding_type": "rope", **case.model}
    return GPTModel(config, spec, VOCABULARY, LENGTH, **model)


def in_our_order(case: Case, names: list[str], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of theirs under our names; each of them has to be used."""
    used: set[str] = set()

    def make(name: str) -> Tensor:
        path, _, kind = name.rpartition(".")
        kind = "" if kind == "softmax_offset" else kind
        layer = re.match(r"decoder\.layers\.(\d+)\.", path)
        path, prefix = (
            (path[layer.end() :], f"{THEIR_LAYERS.get(case.kind, 'model.layers')}.{layer[1]}.") if layer else (path, "")
        )
        source = case.weights[f"{path}.{kind}"] if f"{path}.{kind}" in case.weights else case.weights[path]

        def get(module: str) -> Tensor:
            found = next(full for full in (f"{prefix}{module}.{kind}", f"{prefix}{module}") if full in theirs)
            used.add(found)
            return theirs[found]

        return get(source) if isinstance(source, str) else source(get)

    result = {name: make(name) for name in names}
    assert used == set(theirs), set(theirs) - used
    return result


def close(ours: Tensor, theirs: Tensor, name: str) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert ours.dtype is torch.float64 and error < 1e-10, (name, error.item())


@pytest.mark.slow_cases("Gemma")
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients(name: str) -> None:
    case = CASES[name]
    theirs, ours = theirs_of(case), ours_of(case)
    names = [name for name, _ in ours.named_parameters()]
    parameters = dict(theirs.named_parameters())
    ours.load_state_dict(in_our_order(case, names, {key: value.detach() for key, value in parameters.items()}))
    ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with NothingNarrower():
        logits = theirs(ids, use_cache=False).logits
    close(ours(ids), logits, "logits")
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with NothingNarrower():
        (logits * weight).sum().backward()
    (ours(ids) * weight).sum().backward()
    gradients = in_our_order(case, names, {key: value.grad for key, value in parameters.items()})
    for name, parameter in ours.named_parameters():
        close(parameter.grad, gradients[name], name)
