"""Rules between values: each problem names flags, values and what works."""

from pathlib import Path

import pytest
from support.command_lines import SMALL, configured, problems_of, without
from support.fake_transformer_engine import FAKE

from megatron.core.ops.transformer_engine import engine
from megatron.training.arguments import configure
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment


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
    # ranks
    ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0 must be at least 1"),
    # the model
    ("--hidden-size 66", "--hidden-size 66 is not divisible by --num-attention-heads 4; use 64 or 68, or set"),
    ("--group-query-attention --num-query-groups 3", "--num-query-groups 3 does not divide --num-attention-heads 4"),
    ("--max-position-embeddings 100", "--seq-length 128 is longer than --max-position-embeddings 100"),
    ("--encoder-seq-length 64", "--encoder-seq-length 64 and --seq-length 128 mean the same and differ; give one"),
    ("--encoder-num-layers 7", "--encoder-num-layers 7 and --num-layers"),
    ("--position-embedding-type rope --rotary-percent 1.5", "--rotary-percent 1.5 must be larger than 0 and at most 1"),
    (
        "--position-embedding-type rope --rotary-percent 0.2",
        "--rotary-percent 0.2 of --kv-channels 16 rotates 3 channels",
    ),
    (
        "--position-embedding-type mrope",
        "--position-embedding-type mrope: not yet; what works so far is learned_absolute",
    ),
    (
        "--glu-linear-offset 1",
        "--glu-linear-offset 1.0 is for an MLP with a gate; add --swiglu, --geglu, --exact-geglu or --quick-geglu",
    ),
    ("--activation-func-clamp-value 7", "--activation-func-clamp-value 7.0 is for an MLP with a gate"),
    ("--hidden-dropout 1", "--hidden-dropout 1.0 must be at least 0 and less than 1"),
    ("--seed 0", "--seed 0 must be larger than 0"),
    ("--num-experts 100000000000", "--num-experts 100000000000 must be at most 100000"),
    ("--hidden-size 100000000000", "--hidden-size 100000000000 must be at most 1000000"),
    ("--seq-length 100000000000", "--seq-length 100000000000 must be at most 2147483647"),
    ("--expert-model-parallel-size 8", "--expert-model-parallel-size 8 spreads experts over ranks: it needs"),
    ("--num-experts 8 --expert-model-parallel-size 2", "1 rank (WORLD_SIZE) is not divisible by 2, which is"),
    (
        "--num-experts 8 --tensor-model-parallel-size 2",
        "--num-experts 8 with --tensor-model-parallel-size 2: training needs --sequence-parallel",
    ),
    (
        "--layout-invariant --global-batch-size 4 --bf16 --use-precision-aware-optimizer --exp-avg-sq-dtype fp8 "
        "--tensor-model-parallel-size 2",
        "--layout-invariant: --exp-avg-sq-dtype fp8 has scales for blocks of a rank's part of a tensor",
    ),
    (
        "--layout-invariant --global-batch-size 4 --fp8-format e4m3 --fp8-recipe blockwise --context-parallel-size 2",
        "--layout-invariant: --fp8-recipe blockwise cuts each rank's part of a tensor into blocks, which depend on",
    ),
    (
        "--layout-invariant --global-batch-size 4 --fp8-format e4m3 --fp8-recipe mxfp8 --context-parallel-size 2",
        "--layout-invariant: --fp8-recipe mxfp8 cuts each rank's part of a tensor into blocks, which depend on",
    ),
    (
        "--layout-invariant --global-batch-size 4 --fp4-format e2m1 --context-parallel-size 2",
        "--layout-invariant: --fp4-format e2m1 cuts each rank's part of a tensor into blocks, which depend on",
    ),
    ("--fp8-format hybrid --fp4-format e2m1", "--fp8-format hybrid and --fp4-format e2m1 are set together; choose one"),
    # number formats
    ("--fp16 --bf16", "--fp16 and --bf16 are set together; choose one"),
    ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16 and --accumulate-"),
    # optimizer
    (
        "--optimizer muon --muon-coefficient-type aol",
        "--muon-coefficient-type aol: not yet; what works so far is simple or quintic or polar_express",
    ),
    (
        "--optimizer muon --use-precision-aware-optimizer",
        "--use-precision-aware-optimizer needs --optimizer adam",
    ),
    (
        "--layout-invariant --global-batch-size 4 --optimizer muon --muon-tp-mode blockwise "
        "--tensor-model-parallel-size 2",
        "--layout-invariant: --muon-tp-mode blockwise orthogonalises the part of a matrix on each rank",
    ),
    ("--clip-grad -1", "--clip-grad -1.0 must be at least 0; 0 turns clipping off"),
    (
        "--bf16 --main-grads-dtype bf16",
        "--main-grads-dtype bf16 needs --use-precision-aware-optimizer; add it, or leave it out",
    ),
    # data
    (
        "--dataloader-type external --full-validation",
        "--full-validation needs data sets, whose length is known; --dataloader-type external has iterables",
    ),
    # tokenizer
    ("--train-samples 9 --step-batch-size-schedule {}", "--step-batch-size-schedule {}: {}: expected TOKENS:SIZE"),
    ("--tokenizer-type SFTTokenizer", "--tokenizer-model: SFTTokenizer needs a tokenizer.json"),
    # evaluation, checkpoints, logs, faults
    ("--ckpt-step 5", "--ckpt-step 5 needs --load: the folder to load from"),
    ("--layout-invariant", "--layout-invariant needs --global-batch-size: without it, the batch grows"),
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


def test_what_is_derived_is_called_by_what_it_is_derived_from() -> None:
    assert problems_of("--train-iters 0") == ["--train-iters 0 must be at least 1"]
    assert problems_of("--lr-warmup-iters 10") == [
        "--lr-warmup-iters 10 leaves nothing of --train-iters 10 to decay over; it must be less"
    ]
    assert problems_of("--lr-warmup-iters 10 --lr-decay-iters 9") == [
        "--lr-warmup-iters 10 leaves nothing of --lr-decay-iters 9 to decay over; it must be less"
    ]
    assert problems_of("--lr -1") == ["--lr -1.0 must be at least 0"]


@pytest.mark.parametrize("flag", ["--hidden-size", "--num-attention-heads", "--max-position-embeddings"])
@pytest.mark.parametrize("number", ["0", "-1"])
def test_a_size_below_one_is_one_line(flag: str, number: str) -> None:
    assert problems_of(f"{flag} {number}") == [f"{flag} {number} must be at least 1"]


def test_the_largest_sizes_that_a_user_may_want() -> None:
    sizes = "--num-layers 1000 --num-experts 1000 --hidden-size 65536 --ffn-hidden-size 1000000"
    tokens = "--vocab-size 2000000 --seq-length 10000000 --max-position-embeddings 10000000 --train-samples 10000000000"
    assert not problems_of(f"{sizes} {tokens}", base=without("--train-iters"))


def test_what_full_recomputation_lacks_is_one_line() -> None:
    name = "--recompute-granularity full needs"
    layers = "--recompute-num-layers, such as 1, which recomputes each layer by itself"
    assert problems_of("--recompute-granularity full") == [f"{name} --recompute-method uniform or block and {layers}"]
    assert problems_of("--recompute-granularity full --recompute-method block") == [f"{name} {layers}"]


def test_a_split_without_shares_is_refused_whatever_the_data() -> None:
    assert problems_of("--split 0,0,0")[0].startswith("--split 0,0,0: all shares are 0")
    assert problems_of("--split {}") != []


@pytest.mark.parametrize("number", ["0", "-3"])
def test_a_number_of_experts_is_refused_once(number: str) -> None:
    (problem,) = problems_of(f"--num-experts {number}")
    assert problem == f"--num-experts {number} must be at least 1"


def test_tokens_that_no_sample_has_are_not_predicted() -> None:
    assert configured("--mtp-num-layers 127").transformer.mtp_num_layers == 127
    (problem,) = problems_of("--mtp-num-layers 128")
    assert problem.startswith("--mtp-num-layers 128 must be less than --seq-length 128")


def test_a_split_for_data_that_is_used_whole(tmp_path: Path) -> None:
    base = SMALL.replace("--mock-data", "--train-data-path a --valid-data-path b")
    assert problems_of(base=base) == []
    assert problems_of("--split 1,0,0", base=base)[0].startswith("--split 1,0,0 does not go with --train-data-path")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--decrease-batch-size-if-needed",
            "makes the batch depend on the number of data parallel ranks; leave it out",
        ),
        (
            "--num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
            "global_aux_loss of --moe-router-load-balancing-type global_aux_loss depends on the order in which data "
            "parallel ranks process micro-batches; aux_loss and seq_aux_loss do not",
        ),
    ],
)
def test_layout_invariant_refuses_what_depends_on_the_layout(flags: str, problem: str) -> None:
    (found,) = problems_of(f"--layout-invariant --global-batch-size 4 {flags}")
    assert found.startswith("--layout-invariant: ") and found.endswith(problem)


def test_layout_invariant_refuses_scales_of_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--layout-invariant --global-batch-size 4 --fp8-format hybrid --transformer-impl transformer_engine"
    monkeypatch.setattr(engine, "find_engine", lambda: "it is not installed")
    assert problems_of(flags) == []
    monkeypatch.setattr(engine, "find_engine", lambda: FAKE)
    (found,) = problems_of(flags)
    assert "--transformer-impl transformer_engine computes scales from each rank's values" in found


@pytest.mark.parametrize(
    "flags",
    [
        "--eod-mask-loss",
        "--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-expert-capacity-factor 1",
        "--calculate-per-token-loss",
    ],
)
def test_layout_invariant_accepts_what_depends_on_the_micro_batch_size_alone(flags: str) -> None:
    assert problems_of(f"--layout-invariant --global-batch-size 4 {flags}") == []


def test_batch_sizes_that_change_and_those_of_evaluation() -> None:
    base = SMALL.replace("--train-iters 10", "--train-samples 1000").split()

    def problems(steps: str, flags: str = "", ranks: int = 1) -> list[str]:
        words = [*base, *flags.split(), *(["--step-batch-size-schedule", steps] if steps else [])]
        try:
            configure(words, launch_environment=LaunchEnvironment(ranks, False))
        except ConfigurationError as error:
            return error.problems
        return []

    assert problems("0:2 1K:4") == problems("", "--eval-micro-batch-size 1 --eval-global-batch-size 3") == []
    assert problems("0:3 1K:4")[0].startswith("the batch size 3 of --step-batch-size-schedule is not divisible by")
    assert problems("0:2 1K:4", "--global-batch-size 8")[0].startswith("--global-batch-size 8 is not the last size of")
    assert problems("0:2 1K", "")[0] == "--step-batch-size-schedule 0:2 1K: 1K: expected TOKENS:SIZE, such as 200B:768"
    assert "both set the batch size" in problems("0:2 1K:4", "--rampup-batch-size 2 2 8")[0]
    assert problems("", "--eval-global-batch-size 6", 2)[0] == (
        "--eval-global-batch-size 6 of an evaluation is not divisible by --micro-batch-size 2 x 2 data parallel ranks; "
        "use 4 or 8"
    )
    sizes = " ".join(f"{count}K:{2 * count + 2}" for count in range(9))
    assert problems(sizes, "--cuda-graph-impl local") == [
        "--cuda-graph-impl local: each batch size has a graph, and --step-batch-size-schedule has 9 sizes; give at "
        "most 8"
    ]
    assert problems("", "--iterations-to-skip 0 3") == ["--iterations-to-skip 0 3: the first iteration is 1"]
    assert problems("", "--iterations-to-skip 0-3") == ["--iterations-to-skip 0-3: the first iteration is 1"]
    assert problems("", "--iterations-to-skip 3-5 7") == []
    config = configure(
        [*base, "--step-batch-size-schedule", "0:2 640:4"], launch_environment=LaunchEnvironment(1, False)
    )
    assert config.training.global_batch_size == 4 and config.training.train_iters == 3 + (1000 - 6) // 4


def test_a_script_with_data_sets_of_its_own_needs_no_files() -> None:
    words, defaults = without("--mock-data").split(), {"datasets_of_script": True}
    words += ["--train-iters", "100000000000"]  # until a user stops the run; no order of samples is computed
    config = configure(words, args_defaults=defaults, launch_environment=LaunchEnvironment(1, False))
    assert config.data.data_path is None and config.data.datasets_of_script


def test_scales_that_follow_from_the_width() -> None:
    assert problems_of("--use-mup --mup-base-hidden-size 16") == []
    (problem,) = problems_of("--use-mup --logit-scale 0.5")
    assert problem == "--use-mup sets --logit-scale itself (--help use_mup); leave it out"
    (problem,) = problems_of("--multi-latent-attention --use-mup")
    assert problem.startswith("--use-mup: not yet with --multi-latent-attention")
    assert configured("--use-mup --mup-base-hidden-size 16").optimizer.mup_width_mult == 4.0
    without_mup = configured("--mup-width-mult 4")
    assert without_mup.optimizer.mup_width_mult == 1.0 and any("--mup-width-mult" in note for note in without_mup.notes)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--ema-decay 0.9", "an evaluation exchanges all weights for the average: leave out --ema-decay 0.9"),
        ("--optimizer muon", "--optimizer muon updates whole matrices of all layers at once; adam and sgd work"),
        ("--qk-clip", "--qk-clip scales weights after the updates of all layers; leave one out"),
        ("--fp8-format e4m3 --fp8-param-gather", "weights in fp8 stay in memory; leave out --fp8-param-gather"),
        (
            "--use-precision-aware-optimizer",
            "--use-precision-aware-optimizer keeps main weights as the difference to weights in memory: leave it out, "
            "or give --main-params-dtype fp16",
        ),
        ("--num-experts 2 --moe-use-upcycling --load .", "--moe-use-upcycling writes to weights in memory; upcycle in"),
        ("--num-distributed-optimizer-instances 2", "keeps weights that ranks share: give at least two data parallel"),
    ],
)
def test_weights_in_a_file_refuse_what_needs_them_in_memory(flags: str, says: str) -> None:
    found = problems_of(f"--bf16 --use-torch-fsdp2 --param-nvme-offload-path /disk {flags}", ranks=2)
    assert any(one.startswith("--param-nvme-offload-path /disk") and says in one for one in found), found
