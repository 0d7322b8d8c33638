"""A script like Megatron-LM's under layouts: some ranks build data, and only the first and last stage read it."""

import contextlib
import io
import os
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks
from support.runs import TINY, Outcome, logger_of, run_script, train
from torch import Tensor, nn
from training.test_user_scripts import EXACT, datasets_of, gpt_model, losses_of, three_values

from megatron.core import mpu
from megatron.core.declarations.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.facades import global_vars
from megatron.facades.training import build_train_valid_test_data_iterators, evaluate, setup_model_and_optimizer
from megatron.facades.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank, unwrap_model
from megatron.training import get_args, initialize_megatron, train_step
from megatron.training.arguments import core_transformer_config_from_args


def model_of_stage(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
    return gpt_model(pre_process, post_process, vp_stage=vp_stage)


def is_first_or_last(vp_stage: int | None) -> bool:
    return mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage) or mpu.is_pipeline_last_stage(
        ignore_virtual=False, vp_stage=vp_stage
    )


def datasets_of_stage(counts: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    return datasets_of(counts, lambda: is_first_or_last(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0)


def step_of_stage(data_iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
    batch: dict[str, Any] = dict.fromkeys(("tokens", "labels", "loss_mask", "attention_mask", "position_ids"))
    if is_first_or_last(unwrap_model(model).vp_stage):
        batch = get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator))
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(three_values, batch["loss_mask"])


LAYOUTS = {
    "TP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "CP": "--context-parallel-size 2",
    "PP": "--pipeline-model-parallel-size 2",
    "VPP": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "zb-v": "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v",
}


def as_torchrun_says() -> None:
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}


class HalfOfEachLayer(TransformerLayer):
    """A layer class of a script, written for Megatron-LM."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        output, context = super().forward(hidden_states, attention_mask=attention_mask, **kwargs)
        return 0.5 * (hidden_states + output), context


class UnscaledAttention(nn.Module):
    """An attention class of a script, with Megatron-LM's signature."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **kwargs: Any) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, attn_mask_type: Any = None, **_: Any
    ) -> Tensor:
        scores = torch.einsum("sbad,tbad->bast", query, key).masked_fill(attention_mask, -10000.0)
        return torch.einsum("bast,tbad->sbad", scores.softmax(-1), value).flatten(2)


def model_of_own_layers(own_attention: bool, pre_process: bool = True, post_process: bool = True) -> GPTModel:
    args, spec = get_args(), get_gpt_layer_local_spec()
    spec.module = HalfOfEachLayer
    if own_attention:
        spec.submodules.self_attention.submodules.core_attention = UnscaledAttention
    config = core_transformer_config_from_args(args)
    return GPTModel(config, spec, args.padded_vocab_size, args.max_position_embeddings, pre_process, post_process)


def run_own_layers(flags: list[str], own_attention: bool) -> list[Outcome]:
    if dist.is_initialized():
        as_torchrun_says()
    model = partial(model_of_own_layers, own_attention)
    return [run_script(each, datasets_of_stage, model, ModelType.encoder_or_decoder, step_of_stage) for each in flags]


def message_of_own_attention(flags: str) -> str:
    with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said:
        run_own_layers([flags], True)
    return said.getvalue()


ZERO_3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"


@pytest.mark.slow
def test_own_layer_and_attention_classes_under_context_parallelism_and_zero_3(corpus):
    """In float64; a norm of the gradients and later losses agree with one process if the gradients do."""
    flags = f"--fp64 --data-path {corpus} --train-iters 3 --eval-iters 1 --eod-mask-loss {EXACT} --hidden-dropout 0.1"
    for own_attention, layouts in ((False, ("--context-parallel-size 2", ZERO_3)), (True, (ZERO_3,))):
        (expected,) = run_own_layers([flags], own_attention)
        by_rank = run_on_ranks(run_own_layers, 2, [f"{flags} {layout}" for layout in layouts], own_attention)
        for number, layout in enumerate(layouts):
            found = logger_of([outcomes[number] for outcomes in by_rank])
            assert losses_of(found) == pytest.approx(losses_of(expected), abs=1e-11), layout
            norms = [step.grad_norm for step in expected.steps]
            assert [step.grad_norm for step in found.steps] == pytest.approx(norms, rel=1e-11), layout
    for message in run_on_ranks(message_of_own_attention, 2, f"{flags} --context-parallel-size 2"):
        assert "UnscaledAttention as core_attention of a layer spec: not with context parallelism" in message


def loop_in_layouts(flags: list[str], words: list[str]) -> list[list[float]]:
    """Megatron-LM's functions one by one, as `test_user_scripts` has them; losses where there are any."""
    as_torchrun_says()
    found = []
    for each in flags:
        sys.argv = ["script.py", *words, *each.split()]
        initialize_megatron()
        args, losses = get_args(), []
        model, optimizer, scheduler = setup_model_and_optimizer(model_of_stage, ModelType(1))
        data, valid, _ = build_train_valid_test_data_iterators(datasets_of_stage)
        config, schedule = model[0].config, get_forward_backward_func(vp_size=len(model))
        while args.iteration < args.train_iters:
            loss, *_ = train_step(step_of_stage, data, model, optimizer, scheduler, config, schedule)
            losses += [float(value) for value in loss.values()]
        losses += [float(v) for v in evaluate(step_of_stage, valid, model, None, config)[0].values()]
        found.append(losses)
        global_vars.clear_current_run()
    return found


@pytest.mark.slow
def test_a_loop_of_ones_own_under_layouts(corpus):
    flags = f"--fp64 --num-layers 4 --data-path {corpus} --train-iters 2 --eval-iters 1 --eod-mask-loss {EXACT}"
    expected = train(flags)
    by_rank = run_on_ranks(loop_in_layouts, 2, list(LAYOUTS.values()), f"{TINY} {flags}".split())
    for number, name in enumerate(LAYOUTS):
        found = [losses[number] for losses in by_rank]
        (curve,) = {tuple(losses) for losses in found if losses}
        assert curve[:2] == pytest.approx(expected.losses, abs=1e-11), name
        assert curve[2:] == pytest.approx(losses_of(expected)[2:3]), name  # which is told in float32
        assert ([] in found) == ("pipeline" in LAYOUTS[name]), name
