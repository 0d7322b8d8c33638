"""Writes the table of docs/modules.md: what each module of a small model has on a rank, found in the model itself."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.groups.process_groups_config import ProcessGroupCollection
from megatron.core.groups.rank_grid import RankGrid
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.parameters import info_of
from megatron.core.transformer.captured_parts import PartGraphs, capture_layer_parts
from megatron.core.transformer.transformer_config import TransformerConfig

PAGE = Path(__file__).parents[2] / "docs/modules.md"
_HEAD = "| module | class | on a rank, of the whole | split over | gradient summed over | recompute | graph | fp8 |"
_MODEL: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
_MODEL |= {"num_query_groups": 2, "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu}
_MODEL |= {"num_moe_experts": 4, "moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 128, "bf16": True}
_MODEL |= {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}
_MODEL |= {"expert_tensor_parallel_size": 1, "add_bias_linear": False, "moe_grouped_gemm": True}
_MODEL |= {"transformer_impl": "local"}  # the same on every machine
_PARTS = {
    "recompute": ("core_attn", "layernorm", "mlp", "mlp_act", "moe", "moe_act", "shared_experts"),
    "graph": ("attn", "mlp", "moe_router"),
    "fp8": ("yes",),
}


def build(column: str = "", part: str = "") -> GPTModel:
    """Returns the first rank's part of the model, with one part recomputed or captured, or in fp8."""
    recompute = {"recompute_granularity": "selective", "recompute_modules": [part]}
    settings = (
        recompute if column == "recompute" else {"fp8": "e4m3", "fp8_recipe": "blockwise"} if part == "yes" else {}
    )
    config = TransformerConfig(**_MODEL, **settings)
    groups = ProcessGroupCollection.from_grid(RankGrid(2, tensor=2, expert=2, expert_tensor=1), 0, planned=True)
    with torch.device("meta"):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        model = GPTModel(config, spec, 256, 32, position_embedding_type="rope", pg_collection=groups)
    recorder: Any = None  # nothing runs
    capture_layer_parts([model], [part] if column == "graph" else [], PartGraphs(recorder, 1))
    return model


def kinds(module: nn.Module) -> dict[str, type]:
    """Returns the types of a module's own attributes and children; what is recomputed or captured has another type."""
    return {name: type(value) for name, value in {**vars(module), **dict(module.named_children())}.items()}


def table() -> str:
    """Returns the table. What a setting changes is found by building the model with and without it."""
    built = {column: {part: build(column, part) for part in parts} for column, parts in _PARTS.items()}
    lines = [_HEAD, "|---" * 8 + "|"]
    for path, module in build().named_modules():
        cells = ["", "", ""]
        for info in map(info_of, module.parameters(recurse=False)):
            axes = (", ".join(sorted(found)) for found in (info.sharded_axes, info.partial_gradient_axes))
            cells = [f"{list(info.box.shape)} of {list(info.global_shape)}", *axes]
        for models in built.values():
            changed = (part for part, model in models.items() if kinds(model.get_submodule(path)) != kinds(module))
            cells.append(", ".join(changed))
        repeated = path.startswith("decoder.layers.1.") and ".mlp" not in path
        if any(cells) and not repeated:
            lines.append(f"| {path} | {' | '.join([type(module).__name__, *cells])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text("utf-8").split(_HEAD)[0] + table(), "utf-8")
