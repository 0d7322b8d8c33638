"""Runs made small: every dimension of the layout stays, sizes fit them, and both command lines are right."""

import json

import pytest

from megatron.core.exceptions import UserError
from megatron.core.transformer.config.heterogeneous import described_layers
from megatron.core.transformer.layer_patterns import layer_parts
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.diagnosis.layout_check.shrink_run import ShrunkRun, flags_that_matter, shrink_run
from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --seq-length 8192 "
    "--max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 128 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --bf16 --lr 1e-4 "
    "--train-iters 1000 --data-path some_text_document --split 99,1,0 --tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model there --save here --tensorboard-dir logs --attention-backend flash --lr-decay-style cosine "
    "--group-query-attention --num-query-groups 8"
)


DEEPSEEK = (
    "--num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-router-num-groups 8 "
    "--moe-router-group-topk 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-shared-expert-intermediate-size 2048 "
    "--moe-layer-freq ([0]*3+[1]*29) --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
    "--sequence-parallel --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-router-topk-scaling-factor 2.5"
)


def config_of(flags: str, ranks: int) -> PretrainConfig:
    return configure(flags_that_matter(f"{LLAMA} {flags}".split()), launch_environment=LaunchEnvironment(ranks, False))


def small_of(flags: str, ranks: int, processes: int = 8) -> tuple[ShrunkRun, PretrainConfig, PretrainConfig]:
    small = shrink_run(config_of(flags, ranks), processes, 3)
    launch_environment = LaunchEnvironment(small.sizes.ranks, False)
    layout = configure(small.words, launch_environment=launch_environment)
    plain = configure(small.plain_words, launch_environment=LaunchEnvironment(1, False))
    differing = {name for name, value in layout.model.transformer.__dict__.items() if value != _of(plain, name)}
    assert differing <= LAYOUT_FIELDS, differing
    assert layout.training.global_batch_size == plain.training.global_batch_size
    assert layout.training.micro_batch_size == plain.training.micro_batch_size
    return small, layout, plain


def _of(config: PretrainConfig, name: str):
    return getattr(config.model.transformer, name)


LAYOUT_FIELDS = {
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel"),
    *("virtual_pipeline_model_parallel_size", "pipeline_schedule", "pipeline_model_parallel_layout", "cp_comm_type"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_dtype"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "overlap_p2p_comm"),
    *("hierarchical_context_parallel_sizes", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("recompute_modules", "batch_p2p_comm", "deallocate_pipeline_outputs", "tp_comm_overlap"),
    *("microbatch_group_size_per_vp_stage", "expert_model_parallel_size", "expert_tensor_parallel_size"),
}


@pytest.mark.parametrize(
    ("flags", "ranks", "sizes"),
    [
        ("--tensor-model-parallel-size 8 --sequence-parallel", 64, (2, 1, 1, 4)),
        ("--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4", 64, (2, 1, 2, 2)),
        ("--tensor-model-parallel-size 2 --context-parallel-size 4 --pipeline-model-parallel-size 8", 64, (2, 2, 2, 1)),
        ("--tensor-model-parallel-size 16", 16, (8, 1, 1, 1)),  # more ranks than groups of keys and values
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 4", 8, (1, 1, 4, 2)),
        ("--pipeline-model-parallel-size 4 --pipeline-schedule zb-v", 4, (1, 1, 4, 1)),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E|t*16|t*16|L", 4, (1, 1, 4, 1)),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5 --micro-batch-size 2",
            4,
            (1, 1, 4, 1),
        ),
        ("--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split --num-layers 31", 4, (1, 1, 2, 2)),
        ("--context-parallel-size 8 --cp-comm-type a2a", 16, (1, 4, 1, 2)),
        (
            "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2",
            16,
            (1, 4, 1, 2),
        ),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 4", 32, (1, 1, 1, 8)),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", 32, (1, 1, 1, 8)),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 8", 8, (1, 1, 1, 8)),
        (
            "--window-size 127,0 --window-attn-skip-freq [0,1]*16 --no-rope-freq 4 --context-parallel-size 2",
            4,
            (1, 2, 1, 2),
        ),
    ],
)
def test_every_dimension_stays(flags, ranks, sizes):
    small, layout, _ = small_of(flags, ranks)
    grid = layout.grid
    assert (grid.tensor, grid.context, grid.pipeline, grid.data) == sizes
    assert small.sizes.ranks <= 8 and layout.transformer.num_layers <= 16 and layout.transformer.hidden_size == 32
    assert layout.transformer.fp64 and layout.data.mock_data and layout.checkpoint.save is None
    assert layout.transformer.gated_linear_unit and layout.model.untie_embeddings_and_output_weights


def test_token_mixers_stay():
    hybrid = "--is-hybrid-model --mamba-num-groups 4 --pipeline-model-parallel-size 2 --context-parallel-size 2"
    _, layout, plain = small_of(f"{hybrid} --hybrid-layer-pattern {'MM*-' * 4}|{'MM*-' * 4}", 4)
    assert layout.transformer.hybrid_layer_pattern == plain.transformer.hybrid_layer_pattern == "M*-M"
    _, layout, _ = small_of("--experimental-attention-variant gated_delta_net --linear-attention-freq 4", 2)
    assert layout.transformer.experimental_attention_variant == "gated_delta_net"
    assert layout.transformer.linear_attention_freq == 2 and layout.transformer.linear_num_key_heads == 2


def test_kinds_of_described_layers_stay():
    blocks = [{"attention": {"no_op": True}, "ffn": {"intermediate_size": 512}}, {"ffn": {"replace_with_linear": True}}]
    text = json.dumps({"block_configs": blocks * 16}, separators=(",", ":"))
    _, layout, _ = small_of(f"--heterogeneous-layers-config-encoded-json {text}", 2)
    parts = [layer_parts(layout.transformer, number) for number in (1, 2)]
    assert layout.transformer.num_layers == 2 and parts == [(None, "mlp"), ("attention", "linear")]
    assert described_layers(layout.transformer)[0].ffn_hidden_size is None


def test_kinds_of_heads_and_patterns_stay():
    _, layout, _ = small_of("--tensor-model-parallel-size 2", 4)
    transformer = layout.transformer
    assert 1 < transformer.num_query_groups < transformer.num_attention_heads
    _, layout, _ = small_of("--tensor-model-parallel-size 16", 16)
    assert layout.transformer.num_query_groups < 8  # each group on two ranks
    _, layout, _ = small_of("--window-size 127,0 --window-attn-skip-freq [0,0,0,1]*8 --context-parallel-size 2", 2)
    assert layout.transformer.window_size == (5, 0) and layout.transformer.window_attn_skip_freq == [0, 0]
    _, layout, _ = small_of("--no-rope-freq 4 --pipeline-model-parallel-size 4", 4)
    assert layout.transformer.no_rope_freq == [0, 0, 0, 1, 0, 0, 0, 1]


def test_what_begins_after_some_tokens_is_met():
    flags = "--attention-chunk-size 8192 --attention-chunk-skip-freq 4 --no-rope-freq 4 --nope-temperature-scale 0.1"
    flags += " --nope-temperature-floor 8192 --rope-scaling-type dynamic --rope-scaling-original-length 4096"
    _, layout, _ = small_of(f"{flags} --pipeline-model-parallel-size 4", 4)
    transformer = layout.transformer
    assert transformer.attention_chunk_size == 5 and transformer.attention_chunk_skip_freq == [1, 1, 1, 0, 1, 1, 1, 0]
    assert (transformer.nope_temperature_floor, transformer.rope_scaling_original_length) == (3, 8)
    assert layout.data.seq_length > 8


def test_what_does_not_fit_is_told():
    flags = "--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2"
    small, _, _ = small_of(flags, 16)
    assert small.notes == [
        "layout: tensor 2 x context 2 x pipeline 2 x data 1 instead of tensor 2 x context 2 x pipeline 2 x data 2",
        "data parallelism is left out: 16 processes would be needed, 8 are allowed (--processes 16 takes it in)",
    ]
    small, layout, _ = small_of(f"{flags} --cp-comm-type a2a", 8, processes=4)
    assert layout.grid.context == 1 and any("does not fit" in note and "--cp-comm-type" in note for note in small.notes)
    _, layout, _ = small_of(f"{flags} --sequence-parallel", 8, processes=2)
    assert layout.grid.tensor == 2 and layout.transformer.sequence_parallel


def test_one_rank_has_nothing_to_compare():
    with pytest.raises(UserError, match="there is one rank"):
        shrink_run(config_of("", 1), 8, 3)


def test_what_is_unknown_is_told():
    with pytest.raises(UserError, match="--tensor-parallel: unknown flag"):
        config_of("--tensor-parallel 2", 2)


@pytest.mark.parametrize(
    ("flags", "ranks", "sizes"),
    [
        ("--tensor-model-parallel-size 4 --expert-model-parallel-size 16", 64, (2, 1, 1, 4, 2, 2)),
        (
            "--tensor-model-parallel-size 4 --expert-model-parallel-size 16 --expert-tensor-parallel-size 1",
            64,
            (2, 1, 1, 4, 2, 1),
        ),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --expert-model-parallel-size 64 "
            "--expert-tensor-parallel-size 1",
            512,
            (2, 1, 2, 2, 2, 1),
        ),
    ],
)
def test_experts_stay_shared_out(flags: str, ranks: int, sizes: tuple[int, ...]) -> None:
    small, layout, plain = small_of(f"{DEEPSEEK} {flags}", ranks)
    split = small.sizes
    assert (split.tensor, split.context, split.pipeline, split.data, split.expert, split.expert_tensor) == sizes
    assert (layout.grid.expert, layout.grid.expert_tensor) == sizes[4:]
    transformer = plain.transformer
    assert (transformer.num_moe_experts, transformer.moe_router_topk) == (8, 4)
    assert (transformer.moe_router_num_groups, transformer.moe_router_group_topk) == (4, 2)
    assert transformer.moe_layer_freq[0] == 0 and transformer.moe_layer_freq[-1] == 1
    assert transformer.moe_router_enable_expert_bias and transformer.moe_shared_expert_intermediate_size == 16


def test_latents_stay_latents() -> None:
    flags = "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-layernorm --rotary-scaling-factor 40"
    flags = LLAMA.replace("--group-query-attention --num-query-groups 8", flags)
    config = configure(
        flags_that_matter(f"{flags} --tensor-model-parallel-size 8".split()),
        launch_environment=LaunchEnvironment(16, False),
    )
    small = shrink_run(config, 8, 3)
    plain = configure(small.plain_words, launch_environment=LaunchEnvironment(1, False)).transformer
    assert isinstance(plain, MLATransformerConfig)
    assert (plain.q_lora_rank, plain.kv_lora_rank, plain.rotary_scaling_factor) == (10, 12, 40)


def test_instances_that_do_not_divide_the_replicas_of_experts_are_left_out():
    flags = f"{DEEPSEEK} --expert-model-parallel-size 8 --use-distributed-optimizer"
    flags += " --num-distributed-optimizer-instances 2"
    small, layout, _ = small_of(flags, 32, processes=2)
    assert (small.sizes.data, small.sizes.expert, small.sizes.expert_data) == (2, 2, 1)
    assert layout.ddp.num_distributed_optimizer_instances == 1


def test_context_parallelism_by_document_becomes_that_by_row() -> None:
    flags = "--context-parallel-size 2 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 4096 --sft"
    small, layout, _ = small_of(f"{flags} --calculate-per-token-loss", 4)
    assert small.sizes.context == 2 and not layout.transformer.hybrid_context_parallel
