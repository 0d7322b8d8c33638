"""Values that follow from others, rules between values, and what is said about flags that change nothing."""

import shlex
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_lines import SMALL, configured, problems_of, without

from megatron.core.ops.activation import gelu_tanh, quick_gelu, squared_relu
from megatron.core.parameters import XavierUniform
from megatron.core.transformer.mlp import activation_of
from megatron.training.arguments import configure
from megatron.training.config.derived_values import iterations_of_samples
from megatron.training.config.flag_table import Flag, flag_table
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment

# ---------------------------------------------------------------------------------------------------------------------
# Derived values


def test_the_smallest_run() -> None:
    config = configured()
    assert config.training.global_batch_size == 2 and config.data.seq_length == 128
    assert config.model.max_position_embeddings == 128
    assert config.transformer.num_query_groups == 4 and config.transformer.ffn_hidden_size == 256
    assert config.schedule.lr_decay_iters == 10 and config.data.dataloader_type == "single"
    assert config.parallel.distributed_backend == "gloo" and config.grid.data == 1


@pytest.mark.parametrize(("hidden", "ffn"), [(64, 128), (4096, 10880), (768, 2048)])
def test_swiglu_shrinks_the_mlp_to_a_multiple_of_64(hidden: int, ffn: int) -> None:
    assert configured(f"--swiglu --hidden-size {hidden}").transformer.ffn_hidden_size == ffn
    assert configured("--swiglu --ffn-hidden-size 100").transformer.ffn_hidden_size == 100


def test_activations() -> None:
    def kind(flags: str) -> tuple[object, bool, bool]:
        config = configured(flags).transformer
        return config.activation_func, config.gated_linear_unit, config.bias_activation_fusion

    gelu = torch.nn.functional.gelu
    assert kind("") == (gelu, False, True)
    assert kind("--no-bias-gelu-fusion") == (gelu, False, False)
    assert kind("--disable-bias-linear") == (gelu, False, False)
    assert kind("--openai-gelu --disable-bias-linear")[0] is gelu_tanh
    assert kind("--swiglu")[:2] == (torch.nn.functional.silu, True)
    assert kind("--quick-geglu")[:2] == (quick_gelu, True)
    assert kind("--squared-relu")[:2] == (squared_relu, False)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--num-query-groups 2", "--num-query-groups 2: has no effect without --group-query-attention"),
        (
            "--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01",
            "--moe-aux-loss-coeff 0.01: has no effect with --moe-router-load-balancing-type none",
        ),
        (
            "--num-experts 4 --moe-layer-freq [0]*2",
            "--num-experts 4: has no effect, since --moe-layer-freq gives experts to no layer",
        ),
        (
            "--num-experts 4 --moe-shared-expert-gate",
            "--moe-shared-expert-gate: has no effect without --moe-shared-expert-intermediate-size",
        ),
        (
            "--num-experts 4 --moe-shared-expert-overlap",
            "--moe-shared-expert-overlap: has no effect without --moe-shared-expert-intermediate-size",
        ),
        (
            "--num-experts 4 --moe-token-drop-policy position",
            "--moe-token-drop-policy position: has no effect without --moe-expert-capacity-factor",
        ),
        (
            "--num-experts 4 --moe-router-bias-update-rate 0.1",
            "--moe-router-bias-update-rate 0.1: has no effect without --moe-router-enable-expert-bias",
        ),
        ("--moe-router-pre-softmax", "--moe-router-pre-softmax: has no effect without --num-experts"),
        (
            "--num-experts 4 --moe-router-pre-softmax --moe-router-score-function sigmoid",
            "--moe-router-pre-softmax: has no effect with --moe-router-score-function sigmoid",
        ),
    ],
)
def test_what_nothing_reads_is_said(flags: str, note: str) -> None:
    assert note in configured(flags).notes
    working = (
        "--group-query-attention --num-query-groups 2 --num-experts 4 --moe-layer-freq [0,1] --moe-aux-loss-coeff 0.01 "
        "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate --moe-shared-expert-overlap "
        "--moe-expert-capacity-factor 2 --moe-token-drop-policy position --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
    )
    assert not [line for line in configured(working).notes if "has no effect" in line]


def test_what_hides_exchanges_says_where_there_are_none() -> None:
    def said(flags: str, ranks: int = 1) -> list[str]:
        notes = configured(f"--num-experts 4 {flags}", ranks=ranks).notes
        return [note.partition(":")[0] for note in notes if "hides nothing with --expert-model-parallel-size 1" in note]

    shared = "--moe-shared-expert-overlap"
    both = f"--overlap-moe-expert-parallel-comm {shared} --moe-shared-expert-intermediate-size 64"
    assert said(both) == [shared, "--overlap-moe-expert-parallel-comm"]
    assert said(f"{both} --expert-model-parallel-size 2", ranks=2) == said("") == said(shared) == []
    assert said(f"{both} --expert-tensor-parallel-size 2", ranks=2) == [shared]  # an expert's channels are elsewhere
    assert said(f"{both} --tensor-model-parallel-size 2 --sequence-parallel", ranks=2) == [shared]


def test_query_groups_count_only_with_their_switch() -> None:
    assert configured("--num-query-groups 2").transformer.num_query_groups == 4
    assert configured("--group-query-attention --num-query-groups 2").transformer.num_query_groups == 2
    assert configured("--group-query-attention").transformer.num_query_groups == 1


def test_number_formats() -> None:
    config = configured("--bf16")
    assert config.transformer.params_dtype is config.optimizer.params_dtype is torch.bfloat16
    assert config.optimizer.bf16 and config.ddp.grad_reduce_in_fp32
    assert not configured("--bf16 --grad-reduce-in-bf16").ddp.grad_reduce_in_fp32
    assert configured("--fp64").transformer.params_dtype is torch.float64


def test_init_methods() -> None:
    transformer = configured("--init-method-xavier-uniform").transformer
    assert transformer.init_method == transformer.output_layer_init_method == XavierUniform()


def test_ranks_and_batches() -> None:
    config = configured("--global-batch-size 32", ranks=8)
    assert config.grid.data == config.parallel.data_parallel_size == config.world_size == 8
    assert configured(ranks=8).training.global_batch_size == 16


def test_without_experts_their_sizes_change_no_grid() -> None:
    config = configured("--expert-tensor-parallel-size 2")
    assert config.grid == configured().grid
    assert "--expert-tensor-parallel-size 2: has no effect without --num-experts" in config.notes


def test_the_backend_follows_the_device() -> None:
    assert configured(has_cuda=True).parallel.distributed_backend == "nccl"
    assert configured("--distributed-backend gloo", has_cuda=True).parallel.distributed_backend == "gloo"
    config = configured("--distributed-backend nccl")
    assert config.parallel.distributed_backend == "gloo"
    assert "--distributed-backend nccl: there is no GPU here; gloo is taken" in config.notes


def test_the_length_in_samples() -> None:
    base = without("--train-iters")
    config = configured("--train-samples 101 --global-batch-size 4", base=base)
    assert config.training.train_iters == 25 and config.schedule.lr_decay_samples == 101
    assert config.schedule.lr_decay_iters is None


def test_iterations_of_a_ramp_count_every_step() -> None:
    def simulated(samples: int, size: int, start: int, increment: int, over: int) -> int:
        consumed = steps = 0
        while True:
            per = over / ((size - start) / increment)
            batch = size if consumed > over else min(size, start + int(consumed / per) * increment)
            if consumed + batch > samples and consumed > over:
                return steps
            consumed += batch
            steps += 1

    assert iterations_of_samples(1000, 16, [4, 4, 100]) == simulated(1000, 16, 4, 4, 100)
    assert iterations_of_samples(5000, 64, [8, 8, 777]) == simulated(5000, 64, 8, 8, 777)
    assert iterations_of_samples(100, 10, None) == 10


def test_the_split_and_the_metrics_file_have_defaults_that_are_said() -> None:
    base = SMALL.replace("--mock-data", "--data-path some/prefix")
    config = configured(base=base)
    assert config.data.split == "969,30,1" and any("969,30,1" in note for note in config.notes)
    assert configured("--save somewhere").logging.metrics_path == "somewhere/metrics.jsonl"
    assert configured("--save x --metrics-path y").logging.metrics_path == "y"


def test_formats_of_other_programs_save_in_ours_and_say_so() -> None:
    config = configured("--ckpt-format torch_dist --transformer-impl transformer_engine")
    assert config.checkpoint.ckpt_format == "safetensors"
    assert [note for note in config.notes if note.startswith(("--ckpt-format torch_dist", "--transformer-impl"))]


def test_other_names_of_one_size() -> None:
    base = without("--num-layers").replace("--seq-length", "--encoder-seq-length")
    config = configured("--encoder-num-layers 3", base=base)
    assert config.transformer.num_layers == 3 and config.data.seq_length == 128


def test_provenance() -> None:
    config = configure(
        SMALL.split(), args_defaults={"tensorboard_dir": "x"}, launch_environment=LaunchEnvironment(1, False)
    )
    where = config.provenance
    assert where["num_layers"] == "flag" and where["weight_decay"] == "default"
    assert where["ffn_hidden_size"] == "derived" and where["tensorboard_dir"] == "script"
    assert where["add_qkv_bias"] == "derived"  # by the library, when the config was made


def test_defaults_of_a_script_stand_only_where_there_is_no_value() -> None:
    config = configure(
        SMALL.split(),
        args_defaults={"tokenizer_type": "GPT2BPETokenizer", "tensorboard_dir": "x", "mine": 5},
        launch_environment=LaunchEnvironment(1, False),
    )
    assert config.tokenizer.tokenizer_type == "NullTokenizer" and config.logging.tensorboard_dir == "x"
    assert config.extra == {"mine": 5}
    assert any("GPT2BPETokenizer for tokenizer_type is not used: NullTokenizer stands" in n for n in config.notes)


def test_nothing_can_be_changed_afterwards() -> None:
    config = configured()
    with pytest.raises(AttributeError):
        config.training.train_iters = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        config.training = None  # type: ignore[misc,assignment]


def test_every_value_of_the_flat_view_is_one_of_a_part() -> None:
    config = configured("--bf16")
    flat = config.flat()
    assert flat["num_layers"] == 2 and flat["params_dtype"] is torch.bfloat16 and flat["train_iters"] == 10
    assert set(flat_flags(config)) == set(flag_table()) - mla_only()


def flat_flags(config: PretrainConfig) -> list[str]:
    return [field for field in config.flat() if field in flag_table()]


def mla_only() -> set[str]:
    return {field for field, flag in flag_table().items() if flag.group == "multi-latent attention"}


# ---------------------------------------------------------------------------------------------------------------------
# Rules


@pytest.mark.parametrize(
    "flag", ["--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size", "--lr"]
)
def test_what_every_run_needs(flag: str) -> None:
    problems = problems_of(base=without(flag))
    assert len(problems) == 1 and problems[0].startswith(f"{flag} is missing: ")


def test_a_run_needs_a_length_and_data() -> None:
    assert problems_of(base=without("--train-iters")) == [
        "--train-iters or --train-samples is missing: how long to train"
    ]
    assert problems_of(base=without("--mock-data"))[0].startswith("--data-path is missing")


def test_a_dry_run_needs_neither() -> None:
    config = configured("--dry-run", base=" ".join(w for w in without("--train-iters").split() if w != "--mock-data"))
    assert any("--train-iters or --train-samples is missing" in note for note in config.notes)


RULES = [
    # batches and ranks
    (
        "--global-batch-size 5",
        "--global-batch-size 5 does not divide by --micro-batch-size 2 x 1 data parallel ranks; 4 or 6",
    ),
    ("--rampup-batch-size 1 1 100", "--rampup-batch-size 1 1 100 counts in samples; give --train-samples"),
    ("--micro-batch-size 0", "--micro-batch-size 0 must be at least 1"),
    ("--train-iters 5 --train-samples 5", "--train-iters 5 and --train-samples 5 say how long to train in two ways"),
    ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0 must be at least 1"),
    # the model
    ("--hidden-size 66", "--hidden-size 66 does not divide by --num-attention-heads 4; 64 or 68 works, or set"),
    ("--group-query-attention --num-query-groups 3", "--num-query-groups 3 does not divide --num-attention-heads 4"),
    ("--max-position-embeddings 100", "--seq-length 128 is longer than --max-position-embeddings 100"),
    ("--position-embedding-type rope --rotary-percent 1.5", "--rotary-percent 1.5 must be larger than 0 and at most 1"),
    (
        "--position-embedding-type rope --rotary-percent 0.2",
        "--rotary-percent 0.2 of --kv-channels 16 turns 3 channels",
    ),
    (
        "--position-embedding-type mrope",
        "--position-embedding-type mrope: not yet; what works so far is learned_absolute",
    ),
    ("--swiglu --squared-relu", "--swiglu and --squared-relu choose different activations; give one"),
    (
        "--glu-linear-offset 1",
        "--glu-linear-offset 1.0 is for an MLP with a gate; add --swiglu, --geglu or --quick-geglu",
    ),
    ("--activation-func-clamp-value 7", "--activation-func-clamp-value 7.0 is for an MLP with a gate"),
    ("--hidden-dropout 1", "--hidden-dropout 1.0 must be at least 0 and less than 1"),
    ("--seed 0", "--seed 0 must be larger than 0"),
    ("--expert-model-parallel-size 8", "--expert-model-parallel-size 8 spreads experts over ranks: it needs"),
    ("--num-experts 8 --expert-model-parallel-size 2", "1 ranks (WORLD_SIZE) do not divide by 2, which is"),
    (
        "--num-experts 8 --tensor-model-parallel-size 2",
        "--num-experts 8 with --tensor-model-parallel-size 2: experts are trained with --sequence-parallel only",
    ),
    ("--fp8-format hybrid", "--fp8-format hybrid: not yet"),
    # number formats
    ("--fp16 --bf16", "--fp16 and --bf16 are set together; choose one"),
    ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16 and --accumulate-"),
    # optimizer and schedule
    ("--optimizer muon", "--optimizer muon: not yet; what works so far is adam or sgd"),
    ("--clip-grad -1", "--clip-grad -1.0 must be at least 0; 0 turns clipping off"),
    ("--min-lr 1", "--min-lr 1.0 is larger than --lr 0.001"),
    ("--lr-warmup-init 1", "--lr-warmup-init 1.0 is larger than --lr 0.001"),
    (
        "--lr-warmup-fraction 0.1 --lr-warmup-iters 3",
        "--lr-warmup-fraction 0.1 and --lr-warmup-iters 3 say how long to",
    ),
    ("--lr-warmup-fraction 2", "--lr-warmup-fraction 2.0 must be from 0 to 1"),
    (
        "--lr-warmup-iters 10",
        "--lr-warmup-iters 10 leaves nothing of --train-iters 10 to decay over; it must be less",
    ),
    ("--lr-warmup-samples 10", "--lr-warmup-samples 10 does not go with --train-iters; give --lr-warmup-iters"),
    ("--lr-decay-samples 10", "--lr-decay-samples 10 does not go with --train-iters; give --lr-decay-iters"),
    ("--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    ("--weight-decay-incr-style linear", "--weight-decay-incr-style linear needs --start-weight-decay"),
    ("--end-weight-decay 0.5", "--end-weight-decay 0.5 needs --weight-decay-incr-style linear or cosine"),
    (
        "--use-checkpoint-opt_param-scheduler --override-opt_param-scheduler",
        "--override-opt_param-scheduler and --use-",
    ),
    # data
    ("--data-path x", "--data-path and --mock-data say in 2 ways where data is; give one"),
    ("--dataloader-type external", "--dataloader-type external: not yet; what works so far is single or cyclic"),
    # tokenizer
    ("--tokenizer-type GPT2BPETokenizer", "--vocab-file and --merge-file: GPT2BPETokenizer needs both"),
    ("--tokenizer-type SFTTokenizer", "--tokenizer-type SFTTokenizer: not yet"),
    # evaluation, checkpoints, logs, faults
    ("--eval-interval 0", "--eval-interval 0 must be at least 1"),
    ("--skip-train --eval-iters 0", "--skip-train with --eval-iters 0 leaves nothing to do"),
    ("--ckpt-step 5", "--ckpt-step 5 needs --load: the folder to load from"),
    ("--save x --keep-last 0", "--keep-last 0 must be at least 1"),
    ("--log-interval 0", "--log-interval 0 must be at least 1"),
    ("--profile --profile-step-end 5", "--profile-step-end 5 must be larger than --profile-step-start 10"),
    ("--exit-signal SIGKILL", "--exit-signal SIGKILL cannot be caught by any program; SIGTERM or SIGUSR1 can"),
    ("--error-injection-rate 5", "--error-injection-rate 5: not yet"),
    (
        "--layout-invariant --eod-mask-loss",
        "--layout-invariant: --eod-mask-loss leaves micro-batches different numbers",
    ),
    ("--recompute-granularity full", "--recompute-granularity full needs --recompute-method uniform or block"),
    (
        "--recompute-activations --recompute-modules mlp moe",
        "--recompute-modules mlp moe: moe is a part of a layer",
    ),
    ("--recompute-activations --recompute-modules gelu", "--recompute-modules gelu: gelu is no part of a layer"),
    (
        "--distribute-saved-activations --recompute-activations",
        "--distribute-saved-activations spreads inputs of layers: it needs --recompute-granularity full",
    ),
]


@pytest.mark.parametrize(("flags", "message"), RULES, ids=[flags for flags, _ in RULES])
def test_a_rule_names_flags_values_and_what_works(flags: str, message: str) -> None:
    assert any(problem.startswith(message) for problem in problems_of(flags)), problems_of(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--rampup-batch-size 2 4 100 --global-batch-size 16",
            "the batch does not reach --global-batch-size 16; it reaches 14 or 18",
        ),
        ("--rampup-batch-size 16 4 100 --global-batch-size 16", "begins at or above --global-batch-size 16"),
        (
            "--rampup-batch-size 3 1 100 --global-batch-size 16",
            "the batch size 3 of --rampup-batch-size does not divide",
        ),
        (
            "--train-samples 3 --global-batch-size 16",
            "--train-samples 3 is less than one batch of --global-batch-size 16",
        ),
        ("--lr-warmup-iters 1", "--lr-warmup-iters 1 does not go with --train-samples; give --lr-warmup-samples"),
    ],
)
def test_rules_of_runs_by_samples(flags: str, message: str) -> None:
    problems = problems_of(f"--train-samples 1000 {flags}", base=without("--train-iters"))
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        ("--pretrained-checkpoint /no/such", ["--pretrained-checkpoint /no/such: no such folder"]),
        ("--pretrained-checkpoint /no/such --load {there}", []),  # the run has checkpoints of its own
        ("--pretrained-checkpoint {there} --load /no/such", []),
        ("--load /no/such", []),
        (
            "--load /no/such --exit-on-missing-checkpoint",
            ["--load /no/such: no such folder, and --exit-on-missing-checkpoint is given"],
        ),
    ],
)
def test_folders_that_must_hold_a_checkpoint(flags: str, problems: list[str], tmp_path: Path) -> None:
    words = [*SMALL.split(), *flags.format(there=tmp_path).split()]
    for looks in (True, False):
        try:
            configure(words, launch_environment=LaunchEnvironment(1, False, looks_at_files=looks))
        except ConfigurationError as error:
            assert looks and error.problems == problems
        else:
            assert not (looks and problems)


def test_what_is_derived_is_called_by_what_it_is_derived_from() -> None:
    assert problems_of("--train-iters 0") == ["--train-iters 0 must be at least 1"]
    assert problems_of("--lr-warmup-iters 10") == [
        "--lr-warmup-iters 10 leaves nothing of --train-iters 10 to decay over; it must be less"
    ]
    assert problems_of("--lr-warmup-iters 10 --lr-decay-iters 9") == [
        "--lr-warmup-iters 10 leaves nothing of --lr-decay-iters 9 to decay over; it must be less"
    ]
    assert problems_of("--lr -1") == ["--lr -1.0 must be at least 0"]


def test_a_split_without_shares_is_refused_whatever_the_data() -> None:
    assert problems_of("--split 0,0,0")[0].startswith("--split 0,0,0: expected up to three shares")
    assert problems_of("--split {}") != []


@pytest.mark.parametrize("gate", ["--swiglu", "--geglu", "--quick-geglu"])
def test_every_gate_has_an_offset_and_a_clamp(gate: str) -> None:
    transformer = configured(f"{gate} --glu-linear-offset 1 --activation-func-clamp-value 7").transformer
    activation = activation_of(transformer)
    assert (activation.up_offset, activation.clamp) == (1.0, 7.0)


@pytest.mark.parametrize("number", ["0", "-3"])
def test_a_number_of_experts_is_refused_once(number: str) -> None:
    (problem,) = problems_of(f"--num-experts {number}")
    assert problem == f"--num-experts {number} must be at least 1"


def test_tokens_that_no_sample_has_are_not_predicted() -> None:
    assert configured("--mtp-num-layers 127").transformer.mtp_num_layers == 127
    (problem,) = problems_of("--mtp-num-layers 128")
    assert problem.startswith("--mtp-num-layers 128 must be less than --seq-length 128")


def test_latent_attention_says_that_learned_positions_are_added() -> None:
    def told(flags: str) -> bool:
        return any("adds learned ones" in note for note in configured(f"--multi-latent-attention {flags}").notes)

    assert told("") and not told("--position-embedding-type rope")
    assert not told("--position-embedding-type learned_absolute"), "who asks for it knows"


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "corpus_text_document.idx").touch()
    (tmp_path / "half.idx").touch()
    words = SMALL.replace("--mock-data", f"--data-path 1 {tmp_path}/corpus 2 {tmp_path}/half").split()
    words += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "/no/vocab", "--merge-file", "/no/merges"]
    with pytest.raises(ConfigurationError) as caught:
        configure(
            [*words, "--tokenizer-model", "/no/model"],
            launch_environment=LaunchEnvironment(1, False, looks_at_files=True),
        )
    assert caught.value.problems == [
        "--vocab-file /no/vocab: no such file",
        "--merge-file /no/merges: no such file",
        "--tokenizer-model /no/model: no such file or folder",
        f"--data-path {tmp_path}/corpus.idx: no such file; there is {tmp_path}/corpus_text_document",
        f"--data-path {tmp_path}/half.bin: no such file",
    ]


def test_defaults_that_are_not_the_published_ones_are_said_once() -> None:
    line = "defaults that are not Megatron-LM's: --ckpt-format safetensors, --transformer-impl auto"
    assert configured(has_cuda=True).notes[0] == line
    given = configured("--ckpt-format torch --transformer-impl local --distributed-backend gloo")
    assert not any("defaults that are not" in note for note in given.notes)


def test_a_split_for_data_that_is_used_whole(tmp_path: Path) -> None:
    base = SMALL.replace("--mock-data", "--train-data-path a --valid-data-path b")
    assert problems_of(base=base) == []
    assert problems_of("--split 1,0,0", base=base)[0].startswith("--split 1,0,0 does not go with --train-data-path")


# ---------------------------------------------------------------------------------------------------------------------
# Flags that change nothing


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--use-mcore-models", "--use-mcore-models: there are no other models"),
        ("--no-gradient-accumulation-fusion", "--no-gradient-accumulation-fusion: weight gradients always"),
        (
            "--overlap-grad-reduce --overlap-param-gather --tp-comm-overlap",
            "--overlap-param-gather: has no effect without --use-distributed-optimizer",
        ),
        ("--tp-comm-overlap --disable-tp-comm-bulk-wgrad", "--tp-comm-overlap: tensor parallel communication always"),
        ("--tp-comm-overlap-cfg x", "--tp-comm-overlap-cfg x: has no effect without --tp-comm-overlap"),
        ("--decoder-first-pipeline-num-layers 1", "--decoder-first-pipeline-num-layers 1: has no effect while --pipe"),
        ("--cp-comm-type a2a", "--cp-comm-type a2a: has no effect while --context-parallel-size is 1"),
        ("--data-parallel-sharding-strategy optim", "--data-parallel-sharding-strategy optim: has no effect without"),
        (
            "--num-distributed-optimizer-instances 2",
            "--num-distributed-optimizer-instances 2: has no effect without --use-distributed-optimizer",
        ),
        ("--use-torch-fsdp2", "--use-torch-fsdp2: taken as --use-megatron-fsdp --data-parallel-sharding-strategy"),
        ("--async-save --use-persistent-ckpt-worker", "--use-persistent-ckpt-worker: not yet asynchronous"),
        ("--sequence-parallel", "--sequence-parallel: has no effect while --tensor-model-parallel-size is 1"),
        ("--moe-router-topk 4", "--moe-router-topk 4: has no effect without --num-experts"),
        ("--save-interval 3", "--save-interval 3: has no effect without --save"),
        ("--fp8-amax-history-len 8", "--fp8-amax-history-len 8: has no effect without --fp8-format"),
        ("--rotary-base 5", "--rotary-base 5: has no effect without --position-embedding-type rope"),
        (
            "--no-check-for-nan-in-loss-and-grad --nonfinite-action skip",
            "--nonfinite-action skip: has no effect with --no-check-for-nan-in-loss-and-grad",
        ),
        ("--manual-gc-interval 5", "--manual-gc-interval 5: has no effect without --manual-gc"),
        ("--eval-interval 5 --eval-iters 0", "--eval-iters 0: there is no evaluation"),
    ],
)
def test_a_flag_without_effect_is_accepted_with_a_reason(flags: str, note: str) -> None:
    assert any(line.startswith(note) for line in configured(flags).notes), configured(flags).notes


def test_a_default_that_is_given_needs_no_line() -> None:
    quiet = configured().notes
    given = configured(
        "--moe-router-topk 2 --tensor-model-parallel-size 1 --cross-entropy-fusion-impl native --manual-gc-interval 0"
    )
    assert given.notes == quiet


# ---------------------------------------------------------------------------------------------------------------------
# Whatever is written, the result is a config or a list of problems

_LIKELY = (
    "0 1 2 3 4 7 8 64 128 -1 1e-3 0.5 1.0 nan inf abc 1e9 99999999999999999999 , 1,2 [1] ([0]*2) '' fp32 none auto "
    "local flash rope single cyclic WSD cosine constant full selective uniform block {} {x} %s"
)
_WORDS = st.sampled_from(_LIKELY.split())


@st.composite
def _some_flags(draw: st.DrawFn) -> list[str]:
    words = SMALL.split()
    for flag in draw(st.lists(st.sampled_from(list(flag_table().values())), max_size=8)):
        words.append(draw(st.sampled_from(flag.spellings)))
        words += _values_of(draw, flag)
    return words


def _values_of(draw: st.DrawFn, flag: Flag) -> list[str]:
    if flag.switch is not None:
        return []
    likely = st.sampled_from(flag.choices) if flag.choices else _WORDS
    count = flag.nargs if isinstance(flag.nargs, int) else 1
    return draw(st.lists(st.one_of(likely, _WORDS), min_size=count, max_size=count))


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(words=_some_flags(), ranks=st.sampled_from([1, 2, 3, 8]))
def test_any_flags_give_a_config_or_problems(words: list[str], ranks: int) -> None:
    try:
        config = configure(words, launch_environment=LaunchEnvironment(ranks, False))
    except ConfigurationError as error:
        assert error.problems and all(problem and "\n" not in problem for problem in error.problems), shlex.join(words)
    else:
        assert config.transformer.num_layers >= 1 and config.training.global_batch_size >= 1
        assert config.grid.world_size == ranks


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.text(max_size=12), max_size=6))
def test_any_words_give_a_config_or_problems(words: list[str]) -> None:
    if any(word == "-h" or word.startswith("--help") for word in words):
        return
    with pytest.raises(ConfigurationError):
        configure(words, launch_environment=LaunchEnvironment(1, False))
