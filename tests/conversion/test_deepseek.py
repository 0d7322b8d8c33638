"""DeepSeek-V2 and V3: published settings, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion.oracles import Widened, make_model, save_model, sizes_of, some_tokens
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron.conversion.exporting import export_model
from megatron.conversion.families import family_of
from megatron.conversion.importing import import_model
from megatron.core.exceptions import UserError
from megatron.core.micro_batch import MicroBatch
from megatron.core.transformer.layer_metrics import take_layer_metrics
from megatron.training.trained_model import load_trained_model
from pretrain_gpt import build_model

V2, V3 = family_of("DeepseekV2ForCausalLM"), family_of("DeepseekV3ForCausalLM")
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
OF_V3: dict[str, Any] = {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "rope_scaling": YARN,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
}
"""The keys of DeepSeek-V3's config.json that are not defaults of transformers."""
OF_V2: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}


def test_deepseek_v3() -> None:
    fields = V3.fields_of(sizes_of(V3) | OF_V3)
    assert fields["moe_layer_freq"] == [0] * 3 + [1] * 58
    assert (fields["rotary_scaling_factor"], fields["mscale"], fields["mscale_all_dim"]) == (40.0, 1.0, 1.0)
    groups = [fields[f"moe_router_{name}"] for name in ("num_groups", "group_topk", "group_score_topk")]
    assert groups == [8, 4, 2]
    assert "latent_layernorm_epsilon" not in fields
    assert V3.fields_of(sizes_of(V3) | OF_V3 | {"rms_norm_eps": 1e-5})["latent_layernorm_epsilon"] == 1e-6
    assert V3.is_constant("model.layers.61.eh_proj.weight") and not V3.is_constant("model.layers.60.mlp.gate.weight")


def test_deepseek_v2() -> None:
    fields = V2.fields_of(sizes_of(V2) | OF_V2)
    assert fields["moe_shared_expert_intermediate_size"] == 3072
    assert (fields["moe_router_group_score_topk"], fields["moe_router_topk_scaling_factor"]) == (1, 16.0)
    assert "moe_router_num_groups" not in V2.fields_of(sizes_of(V2) | OF_V2 | {"topk_method": "greedy"})


def test_mscale_counts_only_beside_mscale_all_dim() -> None:
    fields = V3.fields_of(sizes_of(V3) | {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7}})
    assert (fields["mscale"], fields["mscale_all_dim"]) == (1.0, 0.0)
    assert fields["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_interleave": False}, "rope_interleave is False; only True is supported"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; only 128 (num_attention_heads) is supported"),
        (
            {"n_shared_experts": 0},
            "n_shared_experts is 0; it must be at least 1 (--moe-shared-expert-intermediate-size)",
        ),
        ({"attention_bias": True}, "attention_bias is True; only False is supported"),
        ({"rope_scaling": YARN | {"truncate": False}}, "rope_scaling with rope_type 'yarn' has truncate, which is "),
        ({"rope_scaling": YARN | {"factor": None}}, "rope_scaling has factor None, but it must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling has rope_type 'linear'; default, yarn are"),
        ({"rope_scaling": YARN | {"mscale": None}}, "rope_scaling has mscale_all_dim without mscale (--mscale), which"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid' is supported"),
        ({"n_group": None}, "n_group is None and topk_group is 4; both must be numbers"),
    ],
)
def test_what_is_unsupported_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refusal:
        V3.fields_of(sizes_of(V3) | OF_V3 | change)
    assert str(refusal.value).startswith(f"config.json: {said}")


def test_deepseek_v2_says_how_many_experts_and_which_method() -> None:
    with pytest.raises(UserError, match="num_experts_per_tok is None, but must be an integer"):
        V2.fields_of(sizes_of(V2) | OF_V2 | {"num_experts_per_tok": None})
    with pytest.raises(UserError, match="topk_method is 'best'; greedy and group_limited_greedy are supported"):
        V2.fields_of(sizes_of(V2) | OF_V2 | {"topk_method": "best"})


LAYERS, WIDTH = 2, 64
NAMES = ("deepseek v3", "deepseek v3.2")
BY_NUMBER = {"mlp_layer_types": None}
"""The number of dense layers says which layers have experts, in all models."""


def quiet(sentence: str) -> None:
    pass


def save_with_prediction(folder: Path, name: str = NAMES[0]) -> dict[str, Tensor]:
    """Saves a DeepSeek-V3 or V3.2 of two layers whose files have a third one, of multi-token prediction, as those of
    the hub have it; returns the tensors of the file."""
    save_model(make_model(name, num_hidden_layers=LAYERS + 1, **BY_NUMBER), folder)
    tensors, ahead = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS}"
    draw = torch.Generator().manual_seed(7)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{ahead}.{norm}.weight"] = torch.rand(WIDTH, generator=draw, dtype=torch.float64) + 0.5
    both = torch.randn(WIDTH, 2 * WIDTH, generator=draw, dtype=torch.float64)
    tensors[f"{ahead}.eh_proj.weight"] = both * 0.1
    tensors[f"{ahead}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{ahead}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    keys = json.loads((folder / "config.json").read_text())
    keys |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    for of_all_layers in ("num_mtp_layers", "mlp_layer_types", "layer_types"):
        keys.pop(of_all_layers, None)
    (folder / "config.json").write_text(json.dumps(keys))
    return tensors


@torch.no_grad()
def losses_two_ahead(name: str, tensors: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Returns the cross entropy [b, s - 2] of the tokens two ahead, by layers of transformers (arXiv:2412.19437,
    section 2.2): a decoder of two layers, and a second one whose only layer is that of multi-token prediction."""
    ahead = f"model.layers.{LAYERS}"
    decoder = make_model(name, num_hidden_layers=LAYERS, **BY_NUMBER)
    decoder.load_state_dict(_stacked(tensors, decoder, {}))
    predictor = make_model(name, num_hidden_layers=1, first_k_dense_replace=0, **BY_NUMBER)
    predictor.load_state_dict(
        _stacked(tensors, predictor, {"model.layers.0": ahead, "model.norm": f"{ahead}.shared_head.norm"})
    )
    decoder.set_experts_implementation("eager")  # the faster one has no float64
    predictor.set_experts_implementation("eager")
    with Widened():
        hidden = decoder.model(tokens).last_hidden_state[:, :-1]
        embedded = decoder.model.embed_tokens(tokens)[:, 1:]
        parts = [_normed(embedded, tensors[f"{ahead}.enorm.weight"]), _normed(hidden, tensors[f"{ahead}.hnorm.weight"])]
        joined = torch.cat(parts, -1) @ tensors[f"{ahead}.eh_proj.weight"].T
        logits = predictor(inputs_embeds=joined).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten(), reduction="none")


def _normed(values: Tensor, weight: Tensor) -> Tensor:
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-5) * weight


def _stacked(tensors: dict[str, Tensor], model: Any, names: dict[str, str]) -> dict[str, Tensor]:
    """Returns the state of a model from tensors as in a file, under other `names`, with those of experts stacked."""
    state = {}
    for key, weight in model.state_dict().items():
        name = key
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        prefix, _, kind = name.partition(".experts.")
        each = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if each is None:
            state[key] = tensors[name]
        else:
            rows = [[tensors[f"{prefix}.experts.{n}.{part}.weight"] for part in each] for n in range(len(weight))]
            state[key] = torch.stack([torch.cat(parts) for parts in rows])
    return state


@pytest.mark.parametrize("name", NAMES)
def test_multi_token_prediction_both_ways(name: str, tmp_path: Path) -> None:
    """The layer behind the last one is that of multi-token prediction: its loss is that of transformers' layers, and an
    export writes the same tensors, with the copies of embedding and output layer."""
    tensors, tokens = save_with_prediction(tmp_path / "theirs", name), some_tokens()
    import_model(tmp_path / "theirs", tmp_path / "ours", build_model, verify=True, log=quiet)
    ours = load_trained_model(build_model, tmp_path / "ours", changes=["--fp64"], log=quiet).model
    ours.train()
    labels, mask = tokens.roll(-1, 1), torch.ones(tokens.shape)
    mask[:, -1] = 0.0
    ours(tokens, labels=labels, loss_mask=mask, micro_batch=MicroBatch(auxiliary_scale=torch.tensor(1.0)))
    (report,) = [metric for metric in take_layer_metrics([ours]) if metric.name == "mtp_1 loss"]
    expected = losses_two_ahead(name, tensors, tokens)
    assert report.count == expected.numel()
    torch.testing.assert_close(report.total, expected.sum(), rtol=1e-10, atol=0)
    export_model(tmp_path / "ours", tmp_path / "back", build_model, log=quiet)
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_copies_of_the_embedding_that_differ_are_refused(tmp_path: Path) -> None:
    tensors = save_with_prediction(tmp_path / "theirs")
    tensors[f"model.layers.{LAYERS}.embed_tokens.weight"] += 1.0
    save_file(tensors, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"2\.embed_tokens\.weight and model\.embed_tokens\.weight differ, but multi"):
        import_model(tmp_path / "theirs", tmp_path / "ours", build_model, log=quiet)


def test_files_without_the_layers_of_prediction_are_imported_without_them(tmp_path: Path) -> None:
    """transformers drops these layers when it saves a model, but not the key."""
    said: list[str] = []
    theirs = save_model(make_model(NAMES[0]), tmp_path / "theirs")
    assert 'predict_layers": 1' in (theirs / "config.json").read_text()
    done = import_model(theirs, tmp_path / "ours", build_model, log=said.append)
    assert "--mtp-num-layers" not in done.flags
    assert any("has no layers of multi-token prediction (num_mtp_layers): imported" in line for line in said)
