"""Rules about layouts: every size that does not fit is named, with what would."""

import pytest
import torch
from support.command_lines import SMALL, configured, problems_of

from megatron.core.distributed.sharding_strategy import ShardingStrategy
from megatron.training.arguments import configure
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment

LAYOUTS = [
    # ranks
    (
        6,
        "--tensor-model-parallel-size 4",
        "6 ranks (WORLD_SIZE) are not divisible by 4, which is --tensor-model-parallel-",
    ),
    (6, "--tensor-model-parallel-size 4", "start 4 or 8 ranks, or give sizes whose product is 3 or 6"),
    (
        12,
        "--pipeline-model-parallel-size 2 --context-parallel-size 4",
        "are not divisible by 8, which is --tensor-model-",
    ),
    # experts
    (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 4 --expert-model-parallel-size 2",
        "2 ranks (WORLD_SIZE) are not divisible by 4, which is --expert-tensor-parallel-size 2 (as "
        "--tensor-model-parallel-size) x --expert-model-parallel-size 2 x --pipeline-model-parallel-size 1; give "
        "sizes whose product is 2, or --expert-tensor-parallel-size 1",
    ),
    (
        3,
        "--num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        "which is --expert-tensor-parallel-size 1 x --expert-model-parallel-size 2 x --pipeline-model-parallel-size 1; "
        "give sizes whose product is 1 or 3",
    ),
    # the model
    (
        8,
        "--tensor-model-parallel-size 8",
        "--tensor-model-parallel-size 8 does not divide --num-attention-heads 4; use 4",
    ),
    (
        4,
        "--tensor-model-parallel-size 4 --ffn-hidden-size 90",
        "--tensor-model-parallel-size 4 does not divide --ffn-hidden-size 90; use 2",
    ),
    (
        4,
        "--tensor-model-parallel-size 4 --num-attention-heads 12 --hidden-size 48 --group-query-attention "
        "--num-query-groups 6",
        "--tensor-model-parallel-size 4 and --num-query-groups 6: neither divides the other; use 2",
    ),
    # the sequence
    (
        4,
        "--context-parallel-size 4 --seq-length 100",
        "--seq-length 100 is not divisible by 8, two chunks for each rank of --context-parallel-size 4; use 96 or 104",
    ),
    (
        4,
        "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 126",
        "--sequence-parallel: --seq-length 126 is not divisible by --tensor-model-parallel-size 4; use 124 or 128",
    ),
    (
        8,
        "--tensor-model-parallel-size 4 --context-parallel-size 2 --sequence-parallel --seq-length 4 "
        "--micro-batch-size 1",
        "--sequence-parallel: --seq-length 4, of which a context parallel rank has 2, is not divisible by "
        "--tensor-model-parallel-size 4; use 8",
    ),
    # virtual stages
    (
        2,
        "--pipeline-model-parallel-size 2 --num-layers 12 --num-layers-per-virtual-pipeline-stage 4",
        "--num-layers-per-virtual-pipeline-stage 4 does not divide the 6 layers of each of the 2 pipeline stages; "
        "use 3 or 6",
    ),
    (
        2,
        "--pipeline-model-parallel-size 2 --num-layers 12 --num-layers-per-virtual-pipeline-stage 3 "
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-layers-per-virtual-pipeline-stage 3 and --num-virtual-stages-per-pipeline-rank 2 say in 2 ways how many",
    ),
    (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 0",
        "--num-virtual-stages-per-pipeline-rank 0 must be at least 1",
    ),
    (
        4,
        "--pipeline-model-parallel-size 4 --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 3",
        "--microbatch-group-size-per-virtual-pipeline-stage 3 is less than --pipeline-model-parallel-size 4",
    ),
    (
        2,
        "--pipeline-model-parallel-size 2 --num-layers 5",
        "--num-layers 5 is not divisible by 2 pipeline stages; use 4 or ",
    ),
    (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 --pipeline-schedule "
        "1f1b",
        "--pipeline-schedule 1f1b has one chunk a rank, --num-virtual-stages-per-pipeline-rank 2 asks for more",
    ),
    # how sequences are exchanged
    (
        4,
        "--context-parallel-size 4 --num-attention-heads 6 --hidden-size 48 --cp-comm-type a2a",
        "--cp-comm-type a2a shares the 6 heads of a tensor parallel rank among 4 context parallel ranks",
    ),
    (
        4,
        "--context-parallel-size 4 --cp-comm-type a2a+p2p",
        "--cp-comm-type a2a+p2p needs two --hierarchical-context-parallel-sizes, of a2a and of p2p; use 2 2",
    ),
    (
        4,
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 3",
        "--hierarchical-context-parallel-sizes 2 3 multiply to 6, not to --context-parallel-size 4",
    ),
    # sharding
    (
        6,
        "--use-distributed-optimizer --num-distributed-optimizer-instances 4",
        "--num-distributed-optimizer-instances 4 does not divide the 6 data and context parallel ranks; use 3 or 6",
    ),
    (
        4,
        "--use-distributed-optimizer --num-distributed-optimizer-instances 2 --num-experts 4 "
        "--expert-model-parallel-size 4",
        "--num-distributed-optimizer-instances 2 does not divide the 1 data parallel ranks of an expert; use 1",
    ),
    (
        2,
        "--use-torch-fsdp2 --use-megatron-fsdp --data-parallel-sharding-strategy optim",
        "--use-torch-fsdp2 shards weights, gradients and optimizer state, --data-parallel-sharding-strategy optim s",
    ),
    (
        2,
        "--use-megatron-fsdp --megatron-fsdp-main-grads-dtype bf16",
        "--megatron-fsdp-main-grads-dtype bf16 is for a model in bfloat16; add --bf16 or leave it out",
    ),
]


@pytest.mark.parametrize(("ranks", "flags", "message"), LAYOUTS)
def test_what_does_not_fit_is_named_with_what_would(ranks: int, flags: str, message: str) -> None:
    problems = problems_of(flags, ranks=ranks)
    assert len(problems) == 1 and message in problems[0], problems


def test_the_sizes_that_are_offered_work() -> None:
    for flags in (
        "--tensor-model-parallel-size 4 --num-attention-heads 12 --hidden-size 48",
        "--context-parallel-size 4 --seq-length 104",
        "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 124",
        "--tensor-model-parallel-size 4 --context-parallel-size 2 --sequence-parallel --seq-length 8 "
        "--micro-batch-size 1",
        "--num-layers 12 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
    ):
        assert problems_of(flags, ranks=8) == [], flags


def test_a_world_of_one_is_told_how_to_start_more() -> None:
    words = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--num-layers", "2"]
    with pytest.raises(ConfigurationError) as caught:
        configure(words, launch_environment=LaunchEnvironment(1, False, world_size_is_given=False))
    assert any("start 4 ranks (torchrun --nproc_per_node 4), or" in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        ("", None),
        ("--num-layers-per-virtual-pipeline-stage 3", 2),
        ("--num-layers-per-virtual-pipeline-stage 6", None),
        ("--num-virtual-stages-per-pipeline-rank 3", 3),
        ("--num-layers 10 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
         "--num-layers-per-virtual-pipeline-stage 2", 3),
    ],
)  # fmt: skip
def test_chunks_of_a_pipeline_stage(flags: str, chunks: int | None) -> None:
    config = configured(f"--num-layers 12 --pipeline-model-parallel-size 2 {flags}", ranks=2)
    assert config.transformer.virtual_pipeline_model_parallel_size == chunks


def test_other_spellings_of_full_sharding() -> None:
    config = configured("--use-torch-fsdp2", ranks=2)
    assert (
        config.ddp.use_megatron_fsdp and config.ddp.data_parallel_sharding_strategy == ShardingStrategy.PARAMETERS.value
    )
    assert config.ddp.use_distributed_optimizer and config.optimizer.use_distributed_optimizer
    whole = configured("--use-megatron-fsdp", ranks=2)
    assert whole.ddp.use_megatron_fsdp and not whole.ddp.use_distributed_optimizer


def test_sharding_over_outer_groups_has_no_effect() -> None:
    """--outer-dp-sharding-strategy optim is what one instance does; several shard over their own ranks."""
    flags = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --outer-dp-sharding-strategy optim"
    assert problems_of(flags, ranks=4) == []
    config = configured(f"{flags} --num-distributed-optimizer-instances 2", ranks=4)
    assert config.ddp.num_distributed_optimizer_instances == 2
    assert [note for note in config.notes if "sharded over the ranks of an optimizer instance" in note]


def test_types_in_which_gradients_are_sent() -> None:
    sharded = "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"
    assert configured(sharded, ranks=2).ddp.grad_reduce_in_fp32
    assert not configured(f"{sharded} --megatron-fsdp-grad-comm-dtype bf16", ranks=2).ddp.grad_reduce_in_fp32
    assert configured(f"{sharded} --megatron-fsdp-grad-comm-dtype fp32", ranks=2).ddp.grad_reduce_in_fp32


def test_types_in_which_gradients_are_accumulated() -> None:
    fsdp = "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --megatron-fsdp-main-grads-dtype "
    config = configured(f"{fsdp} bf16", ranks=2)
    assert config.ddp.main_grads_dtype is torch.bfloat16 and not config.ddp.grad_reduce_in_fp32
    assert configured(f"{fsdp} bf16 --megatron-fsdp-grad-comm-dtype fp32", ranks=2).ddp.grad_reduce_in_fp32
    assert configured(f"{fsdp} fp32", ranks=2).ddp.main_grads_dtype is torch.float32
    aware = configured("--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16").ddp
    assert aware.main_grads_dtype is torch.bfloat16 and not aware.grad_reduce_in_fp32
    (problem,) = problems_of("--bf16 --main-grads-dtype bf16")
    assert "needs --use-precision-aware-optimizer" in problem
    (problem,) = problems_of("--use-precision-aware-optimizer --main-grads-dtype bf16")
    assert problem == "--main-grads-dtype bf16 is for a model in bfloat16; add --bf16 or leave it out"
    (problem,) = problems_of(f"{fsdp} bf16 --accumulate-allreduce-grads-in-fp32", ranks=2)
    assert "contradict each other" in problem
    half = configured(f"{fsdp} fp32 --megatron-fsdp-main-params-dtype fp16", ranks=2).optimizer
    assert half.use_precision_aware_optimizer and half.main_params_dtype is torch.float16


def test_a_dry_run_alone_is_laid_out_for_one_model() -> None:
    words = "--dry-run --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers 8 --hidden-size 64 "
    words += "--num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --tokenizer-type NullTokenizer"
    alone = configure([*words.split(), "--vocab-size", "50"], launch_environment=LaunchEnvironment(1, False, False))
    assert alone.world_size == 8 and alone.grid.data == 1
    assert "--dry-run: for 8 ranks, the fewest for this layout; set WORLD_SIZE=N for another number" in alone.notes
    instances = ["--vocab-size", "50", "--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2"]
    two = configure([*words.split(), *instances], launch_environment=LaunchEnvironment(1, False, False))
    assert two.world_size == 16 and two.grid.data == 2
    told = configure([*words.split(), "--vocab-size", "50"], launch_environment=LaunchEnvironment(16, False))
    assert told.world_size == 16 and told.grid.data == 2


def test_sizes_that_are_suggested_divide_the_ranks_that_there_are() -> None:
    experts = "--num-experts 3 --expert-model-parallel-size 2"
    (line,) = problems_of(experts, ranks=2)
    assert line == "--expert-model-parallel-size 2 does not divide --num-experts 3; use 1"
    assert problems_of("--num-experts 12 --expert-model-parallel-size 8", ranks=8)[0].endswith("12; use 4")
    heads = "--num-attention-heads 3 --hidden-size 48 --tensor-model-parallel-size 2"
    assert problems_of(heads, ranks=2)[-1].endswith("does not divide --num-attention-heads 3; use 1")
    free = LaunchEnvironment(1, False, world_size_is_given=False)
    with pytest.raises(ConfigurationError, match=r"does not divide --num-experts 3; use 1 or 3"):
        configure(f"{SMALL} {experts} --dry-run".split(), launch_environment=free)


GIVEN = "--exact-data-parallel-sums --deterministic-mode --global-batch-size 8"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2"),
        ("--fp16", "--fp16"),
        ("--bf16 --fp8-format hybrid", "--fp8-format hybrid"),
        ("--bf16 --grad-reduce-in-bf16", "--grad-reduce-in-bf16"),
        ("--optimizer muon", "--optimizer muon"),
        ("--num-experts 4", "--num-experts"),
        ("--global-batch-size 65536", "at most 4096 micro-batches of --micro-batch-size"),
    ],
)
def test_others_are_refused(flags: str, problem: str) -> None:
    found = [each for each in problems_of(f"{GIVEN} {flags}") if each.startswith("--exact-data-parallel-sums")]
    assert len(found) == 1 and problem in found[0]


def test_it_needs_repeatable_kernels_and_a_batch() -> None:
    assert problems_of(GIVEN) == [] and problems_of(f"{GIVEN} --bf16 --use-distributed-optimizer") == []
    (found,) = problems_of("--exact-data-parallel-sums --global-batch-size 8")
    assert found.startswith("--exact-data-parallel-sums needs --deterministic-mode")
    (found,) = problems_of("--exact-data-parallel-sums --deterministic-mode")
    assert "needs --global-batch-size" in found
