"""Sharded state dicts of modules: what one layout saves, any other loads through `load_state_dict`."""

from pathlib import Path

import pytest
import torch
from support.processes import run_on_ranks
from support.tiny_models import tiny_config
from torch import Tensor

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LocalNonpersistentObject
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.exceptions import UserError
from megatron.core.initializers import Constant
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters import ParameterInfo, canonical_index, info_of
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.sharded_state import (
    make_sharded_tensors_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
    sharded_state_dict_default,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.facades import parallel_state

VOCABULARY = 37


def build(seed: int = 5, tied: bool = True, groups: int = 4, **settings) -> GPTModel:
    config = tiny_config(
        num_query_groups=groups, gated_linear_unit=True, ffn_hidden_size=24, fp64=False, seed=seed, **settings
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        max_sequence_length=8,
        pre_process=parallel_state.is_unitialized() or parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_unitialized() or parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
        vocab_padding_multiple=8,
    )
    with torch.no_grad():  # norms and biases too are to have values of their own, which tell where they came from
        for parameter in model.parameters():
            info = info_of(parameter)
            if isinstance(info.init, Constant):
                index = canonical_index(info, 0, info.box.numel)
                parameter.view(-1)[: info.box.numel] = torch.sin(seed + index.float())
    return model


def values(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def reload(folder: str, **settings) -> None:
    """Into a model of other values, and nothing that is not there already in one of the same values."""
    model, right = build(seed=6, **settings), values(build(**settings))
    state = dist_checkpointing.load(model.sharded_state_dict(), folder, strict="raise_all")
    model.load_state_dict(state)
    found = values(model)
    assert found.keys() == right.keys()
    assert [name for name in found if not torch.equal(found[name], right[name])] == []
    assert all(value.abs().sum() > 0 for value in found.values())


def _save_and_load(folder: Path, settings: dict) -> None:
    for sizes in LAYOUTS.values():
        parallel_state.initialize_model_parallel(**sizes)
        under = settings | sizes
        dist_checkpointing.save(build(**under).sharded_state_dict(), str(folder / str(sizes)))
        reload(str(folder / "one"), **under)
        parallel_state.destroy_model_parallel()


LAYOUTS = {
    "two tensor parallel": {"tensor_model_parallel_size": 2},
    "two stages": {"pipeline_model_parallel_size": 2},
    "two copies": {},
}


@pytest.mark.fast("untied, one group")
@pytest.mark.parametrize("settings", [{}, {"tied": False, "groups": 1}], ids=["tied", "untied, one group"])
def test_two_ranks_and_one(tmp_path, settings):
    one = str(tmp_path / "one")
    dist_checkpointing.save(build(**settings).sharded_state_dict(), one)
    reload(one, **settings)
    run_on_ranks(_save_and_load, 2, tmp_path, settings)
    for sizes in LAYOUTS.values():
        reload(str(tmp_path / str(sizes)), **settings)


def test_names_shapes_and_prefixes():
    model = build()
    state = model.sharded_state_dict()
    assert list(state) == list(model.state_dict())
    gated = state["decoder.layers.1.mlp.linear_fc1.weight"]
    assert gated.key == "decoder.layers.1.mlp.linear_fc1.weight" and gated.global_shape == (2, 24, 16)
    words = state["embedding.word_embeddings.weight"]
    assert words.global_shape == (VOCABULARY, 16) and words.stored.shape == (40, 16)
    prefixed = model.sharded_state_dict(prefix="model.")
    assert {name: sharded.key for name, sharded in prefixed.items()} == {
        f"model.{name}": f"model.{name}" for name in state
    }
    layer = model.decoder.layers[1]
    assert {sharded.key for sharded in layer.sharded_state_dict("decoder.layers.1.").values()} == {
        key for key in state if key.startswith("decoder.layers.1.")
    }
    with pytest.raises(UserError, match=r"sharded_offsets=\(\(0, 1, 2\),\)"):
        layer.sharded_state_dict("decoder.layers.", ((0, 1, 2),))


def test_lone_layers_and_half_precision(tmp_path):
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, bf16=True)
    linear = ColumnParallelLinear(8, 6, config=config, init_method=config.init_method)
    dist_checkpointing.save(linear.sharded_state_dict("mine."), str(tmp_path / "linear"))
    twin = ColumnParallelLinear(8, 6, config=config, init_method=config.init_method)
    dist_checkpointing.load(twin.sharded_state_dict("mine."), str(tmp_path / "linear"))
    assert torch.equal(twin.weight, linear.weight) and twin.weight.dtype is torch.bfloat16
    model = Float16Module(config, build())
    assert list(model.sharded_state_dict()) == list(model.state_dict())


# ---------------------------------------------------------------------------------------------------------------------
# With an optimizer


def trained(**settings) -> tuple[GPTModel, MegatronOptimizer]:
    """A model whose optimizer's state is a function of places alone: gradients are."""
    model = build(**settings)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(**SHARDED), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, clip_grad=0.0), [wrapped])
    for _ in range(2):
        for chunk in wrapped.gradient_chunks():
            info = ParameterInfo(chunk.global_shape, chunk.box, Constant(0.0))
            index = canonical_index(info, chunk.range[0], chunk.tensor.numel())
            chunk.flat.copy_(torch.cos(index.float()))
        assert optimizer.step()[0]
    return model, optimizer


SHARDED = {"use_distributed_optimizer": True}


def state_of(optimizer: MegatronOptimizer) -> dict[str, Tensor]:
    """By name and place."""
    return {str(chunk): chunk.flat.clone() for chunk in optimizer.state_chunks()}


def _optimizer_into(folder: Path, other: str, sizes: dict) -> None:
    """Saved here, and loaded from what others saved."""
    parallel_state.initialize_model_parallel(**sizes)
    model, optimizer = trained(groups=1, **sizes)
    states = {"model": model.sharded_state_dict(), "optimizer": optimizer.sharded_state_dict()}
    dist_checkpointing.save(states, str(folder / str(sizes)))
    right = state_of(optimizer)
    for _, tensor in states["optimizer"]["state"].items():
        tensor.data.zero_()
    loaded = dist_checkpointing.load({**states, "extra": LocalNonpersistentObject(1)}, other, strict="raise_all")
    optimizer.load_state_dict(loaded["optimizer"])
    found = state_of(optimizer)
    assert found.keys() == right.keys() and loaded["optimizer"]["common"]["update_count"] == 2
    assert [name for name in right if not torch.equal(found[name], right[name])] == []
    assert all(value.abs().sum() > 0 for value in right.values())
    parallel_state.destroy_model_parallel()


def _optimizers(folder: Path, other: str) -> None:
    for sizes in LAYOUTS.values():
        _optimizer_into(folder, other, sizes)


@pytest.mark.slow
def test_an_optimizers_state_goes_along(tmp_path):
    """Ranges of a sharded optimizer, and two boxes of one tensor on a rank (queries, and the one group's key)."""
    one = str(tmp_path / "one")
    model, optimizer = trained(groups=1)
    dist_checkpointing.save({"model": model.sharded_state_dict(), "optimizer": optimizer.sharded_state_dict()}, one)
    run_on_ranks(_optimizers, 2, tmp_path, one)


class Adapter(torch.nn.Module):
    """A script's own module: columns of `up` are split over tensor parallel ranks, `scale` is whole everywhere."""

    def __init__(self) -> None:
        super().__init__()
        size, rank = 1, 0
        if not parallel_state.is_unitialized():
            size, rank = (
                parallel_state.get_tensor_model_parallel_world_size(),
                parallel_state.get_tensor_model_parallel_rank(),
            )
        whole = torch.arange(24.0).view(4, 6)
        self.up = torch.nn.Parameter(whole.chunk(size, dim=1)[rank].contiguous())
        self.scale = torch.nn.Parameter(torch.arange(3.0))
        self.plain = torch.nn.Linear(2, 1)
        with torch.no_grad():
            self.plain.weight.copy_(torch.tensor([[5.0, 6.0]]))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        own = {"up": self.up, "scale": self.scale, "_extra_state": None}
        state = make_sharded_tensors_for_checkpoint(own, prefix, {"up": 1}, sharded_offsets)
        return state | sharded_state_dict_default(self.plain, f"{prefix}plain.", sharded_offsets, metadata)


def _reload_adapter(folder: str) -> None:
    model, right = Adapter(), {name: value.clone() for name, value in Adapter().state_dict().items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "plain.bias":
                parameter.zero_()
            else:
                right[name] = parameter.detach().clone()
    state = sharded_state_dict_default(model, prefix="adapter.")
    loaded = dist_checkpointing.load(state, folder, strict="raise_all")
    model.load_state_dict({name.removeprefix("adapter."): value for name, value in loaded.items()})
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in right.items() if name != "plain.bias")


def _adapters(folder: Path) -> None:
    for sizes in ({"tensor_model_parallel_size": 2}, {}):
        parallel_state.initialize_model_parallel(**sizes)
        _reload_adapter(str(folder / "one"))
        dist_checkpointing.save(Adapter().sharded_state_dict("adapter."), str(folder / f"two{len(sizes)}"))
        parallel_state.destroy_model_parallel()


def test_a_module_says_itself_how_it_is_split(tmp_path):
    dist_checkpointing.save(Adapter().sharded_state_dict("adapter."), str(tmp_path / "one"))
    run_on_ranks(_adapters, 2, tmp_path)
    for folder in ("one", "two0", "two1"):
        _reload_adapter(str(tmp_path / folder))
    stacked = make_tp_sharded_tensor_for_checkpoint(torch.zeros(2, 3), "x", 1, prepend_offsets=((0, 2, 4),))
    assert stacked.global_shape == (4, 2, 3) and stacked.global_offset == (2, 0, 0)
