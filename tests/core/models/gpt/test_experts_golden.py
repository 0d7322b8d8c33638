"""Numbers of Megatron-LM's release of two small models with experts: names, logits, losses and every gradient, the
auxiliary losses' part included; with experts one after the other and in grouped products."""

import pytest
import torch.nn.functional as F
from support.golden import Golden, close, shapes_of

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

MODELS = [Golden("moe_mla", name) for name in ("moe_softmax_auxloss", "moe_sigmoid_group_bias_shared")]
each_model = pytest.mark.parametrize("golden", MODELS, ids=lambda golden: golden.name)


def build(golden: Golden, **settings: object) -> GPTModel:
    described = {**golden.info["config"], "activation_func": F.silu} | settings
    config = TransformerConfig(**described)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(
        config,
        spec,
        vocab_size=128,
        max_sequence_length=32,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    weights = golden.tensors("weights")
    if config.moe_grouped_gemm:
        weights = {grouped(key): value for key, value in weights.items()}
    model.load_state_dict(weights)
    return model


def grouped(key: str) -> str:
    """Megatron-LM's name of an expert's weight with grouped products."""
    before, found, after = key.partition("local_experts.")
    number, _, rest = after.partition(".")
    return f"{before}{rest}{number}" if found else key


@each_model
def test_names_and_shapes_of_the_state_dict(golden: Golden) -> None:
    ours = shapes_of(build(golden))
    saved = {key: shape for key, shape in golden.shapes.items() if not key.endswith("local_tokens_per_expert")}
    assert ours == saved
    stacked = shapes_of(build(golden, moe_grouped_gemm=True))
    assert stacked == {grouped(key): shape for key, shape in ours.items()}


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "flex"])
@pytest.mark.parametrize("is_grouped", [False, True])
@each_model
def test_logits_losses_and_gradients(golden: Golden, is_grouped: bool, dispatcher: str) -> None:
    model = build(golden, moe_grouped_gemm=is_grouped, moe_token_dispatcher_type=dispatcher)
    golden.check_outputs(model)
    megatron_lm = golden.tensors("grads")
    gradients = {}
    for key, parameter in model.named_parameters():
        if parameter.grad is not None and is_grouped and ".experts.linear_fc" in key:
            gradients |= {f"{key}{number}": part for number, part in enumerate(parameter.grad)}
        elif parameter.grad is not None:
            gradients[key] = parameter.grad
    assert gradients.keys() == {grouped(key) if is_grouped else key for key in megatron_lm}
    for key, gradient in megatron_lm.items():
        close(key, gradients[grouped(key) if is_grouped else key], gradient)
