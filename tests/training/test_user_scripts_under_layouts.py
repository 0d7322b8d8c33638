"""A script like Megatron-LM's under layouts: some ranks build data, and only the first and last stage read it."""

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

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.training import get_args, get_tokenizer, global_vars, initialize_megatron, train_step
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.training import (
    build_train_valid_test_data_iterators,
    evaluate,
    setup_model_and_optimizer,
)
from megatron.training.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank, unwrap_model

EXACT = "--make-vocab-size-divisible-by 1"


def three_values(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total = torch.sum(output_tensor.view(-1) * loss_mask.view(-1))
    count = loss_mask.sum().to(torch.int)
    report = torch.cat([total.clone().detach().view(1), count.view(1)])
    return total, count, {"lm loss": report}


def losses_of(outcome: Outcome) -> list[float]:
    return outcome.losses + [record.losses["lm loss"] for record in outcome.validations]


def model_of_stage(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
    args = get_args()
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


def is_first_or_last(vp_stage: int | None) -> bool:
    return mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage) or mpu.is_pipeline_last_stage(
        ignore_virtual=False, vp_stage=vp_stage
    )


def datasets_of_stage(counts: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=True,
        create_attention_mask=False,
    )

    def builds() -> bool:
        return is_first_or_last(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0

    return tuple(BlendedMegatronDatasetBuilder(GPTDataset, counts, builds, config).build())


def step_of_stage(data_iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
    batch: dict[str, Any] = dict.fromkeys(("tokens", "labels", "loss_mask", "attention_mask", "position_ids"))
    if is_first_or_last(unwrap_model(model).vp_stage):
        batch = get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator))
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(three_values, batch["loss_mask"])


SCRIPT_OF_STAGES = (datasets_of_stage, model_of_stage, ModelType.encoder_or_decoder, step_of_stage)
LAYOUTS = {
    "TP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "CP": "--context-parallel-size 2",
    "PP": "--pipeline-model-parallel-size 2",
    "VPP": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "zb-v": "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v",
}


def as_torchrun_says() -> None:
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}


def run_in_layouts(flags: list[str]) -> list[Outcome]:
    as_torchrun_says()
    return [run_script(each, *SCRIPT_OF_STAGES) for each in flags]


def test_a_megatron_lm_script_under_layouts(corpus):
    """In float64, dropout on; a vocabulary of 41, padded for two ranks, which the script hands on as it finds it."""
    flags = f"--fp64 --num-layers 4 --data-path {corpus} --train-iters 3 --eval-iters 1 --eod-mask-loss {EXACT}"
    expected = train(flags)
    by_rank = run_on_ranks(run_in_layouts, 2, [f"{flags} {layout}" for layout in LAYOUTS.values()])
    for number, name in enumerate(LAYOUTS):
        found = logger_of([outcomes[number] for outcomes in by_rank])
        assert losses_of(found) == pytest.approx(losses_of(expected), abs=1e-11), name
        assert [step.grad_norm for step in found.steps] == pytest.approx([s.grad_norm for s in expected.steps]), name


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
