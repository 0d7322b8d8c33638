"""Tiny random GPT-2 and Llama models of `transformers` as independent oracles, in float64."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig


def build(settings: dict, **model) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fp64=True,
        **settings,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=61, max_sequence_length=24, **model)


def randomise(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)


def interleaved(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Rows of separate projections in the order of a joint one: for each group its queries, key and value."""
    parts = [t.view(groups, -1, *t.shape[1:]) for t in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 1)


def from_gpt2(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {
        "embedding.word_embeddings.weight": theirs["transformer.wte.weight"],
        "embedding.position_embeddings.weight": theirs["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": theirs["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": theirs["transformer.ln_f.bias"],
    }
    names = {
        "ln_1": "input_layernorm",
        "attn.c_proj": "self_attention.linear_proj",
        "ln_2": "pre_mlp_layernorm",
        "mlp.c_fc": "mlp.linear_fc1",
        "mlp.c_proj": "mlp.linear_fc2",
    }
    for layer in range(2):
        prefix, target = f"transformer.h.{layer}.", f"decoder.layers.{layer}."
        for theirs_name, ours_name in names.items():
            for kind in ("weight", "bias"):
                value = theirs[f"{prefix}{theirs_name}.{kind}"]
                ours[f"{target}{ours_name}.{kind}"] = value.T if value.dim() == 2 else value
        for kind in ("weight", "bias"):
            q, k, v = theirs[f"{prefix}attn.c_attn.{kind}"].t().chunk(3)
            ours[f"{target}self_attention.linear_qkv.{kind}"] = interleaved(q, k, v, 4)
    return ours


def from_llama(theirs: dict[str, Tensor], groups: int) -> dict[str, Tensor]:
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    for layer in range(2):
        get = {key.split(".", 3)[3]: value for key, value in theirs.items() if f"layers.{layer}." in key}
        target = f"decoder.layers.{layer}."
        projections = (get[f"self_attn.{name}_proj.weight"] for name in "qkv")
        ours[target + "self_attention.linear_qkv.weight"] = interleaved(*projections, groups)
        ours[target + "self_attention.linear_proj.weight"] = get["self_attn.o_proj.weight"]
        ours[target + "mlp.linear_fc1.weight"] = torch.cat([get["mlp.gate_proj.weight"], get["mlp.up_proj.weight"]])
        ours[target + "mlp.linear_fc2.weight"] = get["mlp.down_proj.weight"]
        ours[target + "input_layernorm.weight"] = get["input_layernorm.weight"]
        ours[target + "pre_mlp_layernorm.weight"] = get["post_attention_layernorm.weight"]
    return ours


def compare(ours: GPTModel, theirs: torch.nn.Module, mapping) -> None:
    """Logits, and the gradients of a loss, agree; the mapping takes weights and gradients alike."""
    weights = {name: value.detach() for name, value in theirs.state_dict().items()}
    ours.load_state_dict(mapping(weights))
    ids = torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(1))
    close(ours(ids), theirs(ids).logits, "logits")
    loss = ours(ids[:, :-1], labels=ids[:, 1:])
    expected = F.cross_entropy(theirs(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    close(loss.flatten(), expected, "loss")
    loss.mean().backward()
    expected.mean().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    gradients = mapping({name: gradients.get(name, torch.zeros_like(value)) for name, value in weights.items()})
    for name, parameter in ours.named_parameters():
        close(parameter.grad, gradients[name], name)


def close(ours: Tensor, theirs: Tensor, name: str) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert ours.dtype is torch.float64 and error < 1e-10, (name, error.item())


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_gpt2(activation: str) -> None:
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=24, n_embd=32, n_layer=2, n_head=4, activation_function=activation,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).double()
    randomise(theirs)
    ours = build({"bias_activation_fusion": activation == "gelu_new"}, share_embeddings_and_output_weights=True)
    compare(ours, theirs, from_gpt2)


def norm_in_the_type_given(self, hidden_states: Tensor) -> Tensor:
    scale = torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * hidden_states * scale


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("scaling", [None, "llama3", "linear"])
def test_llama(groups: int, scaling: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Their model computes norms, and the softmax of eager attention, in float32 for any type of the model.
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm
    monkeypatch.setattr(norm, "forward", norm_in_the_type_given)
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    model = {}
    if scaling == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        model = {"rope_scaling": True, "rope_scaling_factor": 16.0}
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": 4.0}
        model = {"seq_len_interpolation_factor": 4.0}
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=groups, head_dim=16, rms_norm_eps=1e-5, rope_parameters=rope, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).double()
    randomise(theirs)
    settings = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "ffn_hidden_size": 40,
        "num_query_groups": groups,
        "kv_channels": 16,
    }
    ours = build(settings, position_embedding_type="rope", rotary_base=50000, **model)
    compare(ours, theirs, lambda weights: from_llama(weights, groups))
