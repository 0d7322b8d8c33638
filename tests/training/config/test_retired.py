"""Flags of older releases become the flags that replace them."""

import pytest
from support.command_lines import configured

from megatron.training.config.command_line import read_command_line
from megatron.training.config.flag_table import flag_table
from megatron.training.config.retired import REFUSED


def read(words: str) -> dict[str, object]:
    line = read_command_line(words.split())
    assert line.problems == []
    return line.values


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("--activations-checkpoint-method uniform", ("full", "uniform", 1)),
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 2", ("full", "block", 2)),
        ("--activations-checkpoint-num-layers 2 --activations-checkpoint-method block", ("full", "block", 2)),
        ("--checkpoint-activations", ("full", "uniform", 1)),
    ],
)
def test_old_recomputation(words: str, fields: tuple[str, str, int]) -> None:
    line = read_command_line(words.split())
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    assert tuple(line.values[name] for name in names) == fields
    assert all("retired" in warning for warning in line.warnings) and line.warnings


def test_old_positions() -> None:
    assert read("--use-rotary-position-embeddings")["position_embedding_type"] == "rope"
    assert read("--no-position-embedding")["position_embedding_type"] == "none"
    assert read("--use-rotary-position-embeddings --no-position-embedding")["position_embedding_type"] == "rope"
    assert read("--no-position-embedding --position-embedding-type rope")["position_embedding_type"] == "rope"


@pytest.mark.parametrize("words", ["--position-embedding-type rope", "--use-rotary-position-embeddings"])
def test_no_learnt_positions_beside_rotary_ones_are_not_said_to_be_none(words: str) -> None:
    config = configured(f"{words} --no-position-embedding")
    assert config.model.position_embedding_type == "rope"
    (note,) = (note for note in config.notes if note.startswith("--no-position-embedding"))
    assert note == "--no-position-embedding: retired; --position-embedding-type sets the positions"
    (note,) = (note for note in configured("--no-position-embedding").notes if note.startswith("--no-position"))
    assert note.endswith("read as --position-embedding-type none")


@pytest.mark.parametrize("asks", [False, True])
def test_a_flag_that_goes_by_ranks_is_refused_with_the_way_that_works(asks: bool) -> None:
    words = ["--num-experts", "8", "--moe-router-topk-limited-devices", "2"]
    line = read_command_line(words, ignore_unknown_args=asks)
    (problem,) = line.problems
    assert problem.startswith("--moe-router-topk-limited-devices 2: retired: with it, a token's experts depend")
    assert problem.endswith(
        "give --moe-router-num-groups (that number) and --moe-router-group-topk (this value) instead"
    )
    assert not line.warnings


def test_each_retired_flag_warns_once() -> None:
    config = configured("--DDP-impl local --DDP-impl local --no-scatter-gather-tensors-in-pipeline")
    assert sum("--DDP-impl local: retired" in note for note in config.notes) == 1
    assert any(note.startswith("--no-scatter-gather-tensors-in-pipeline: retired") for note in config.notes)


@pytest.mark.parametrize("word", flag_table()["position_embedding_type"].declaration.hints)
def test_what_a_hint_says_to_give_is_a_command_line_that_works(word: str) -> None:
    hint = flag_table()["position_embedding_type"].declaration.hints[word]
    way = hint.partition("give ")[2].partition(" (")[0]
    more = {"longrope": "--rope-scaling-short-factor 1 --rope-scaling-long-factor 1"}.get(word, "")
    assert configured(f"{way} {more}").model.position_embedding_type in ("rope", "none")


def test_the_older_spelling_of_weight_decay_of_query_and_key_norms() -> None:
    assert read("--no-weight-decay-cond-type apply_wd_to_qk_layernorm")["apply_wd_to_qk_layernorm"] is True
    assert read_command_line(["--no-weight-decay-cond-type", "other"]).problems


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--fp8-hybrid", "fp8", "hybrid"),
        ("--fp8-e4m3", "fp8", "e4m3"),
        ("--use-checkpoint-lr-scheduler", "use_checkpoint_opt_param_scheduler", True),
        ("--override-lr-scheduler", "override_opt_param_scheduler", True),
        ("--data-impl mmap --mmap-warmup", "data_path", None),
        ("--check-for-nan-in-loss-and-grad --log-batch-size-to-tensorboard", "check_for_nan_in_loss_and_grad", True),
    ],
)
def test_flags_of_releases_before_0_5(words: str, field: str, value: object) -> None:
    line = read_command_line(words.split())
    assert line.values[field] == value and not line.problems
    assert len(line.warnings) == words.count("--") and all("retired" in warning for warning in line.warnings)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--layernorm-epsilon 1e-6", "--layernorm-epsilon 1e-6: retired; read as --norm-epsilon 1e-6"),
        ("--local_rank=1", "--local_rank 1: retired; read as --local-rank 1"),
        ("--use-custom-fsdp", "--use-custom-fsdp: retired; read as --use-megatron-fsdp"),
        ("--s3-cache-path x", "--s3-cache-path x: retired; read as --object-storage-cache-path x"),
        (
            "--distribute-checkpointed-activations",
            "--distribute-checkpointed-activations: retired; read as --distribut",
        ),
        ("--no-query-key-layer-scaling", "--no-query-key-layer-scaling: retired and ignored: scores are not divided"),
        ("--no-delay-grad-reduce", "--no-delay-grad-reduce: retired and ignored: --overlap-grad-reduce reduces"),
        ("--delay-param-gather", "--delay-param-gather: retired and ignored: --overlap-param-gather gathers"),
        ("--moe-token-dropping", "--moe-token-dropping: retired and ignored: it never had an effect"),
        (
            "--moe-balanced-expert-placement",
            "--moe-balanced-expert-placement: retired and ignored: experts stay on their ranks",
        ),
        ("--enable-one-logger", "--enable-one-logger: retired and ignored: there is no such service"),
        (
            "--no-log-learnig-rate-to-tensorboard",
            "--no-log-learnig-rate-to-tensorboard: retired and ignored: the learn",
        ),
    ],
)
def test_flags_of_later_releases(words: str, said: str) -> None:
    line = read_command_line(words.split())
    assert line.warnings[0].startswith(said) and not line.problems


def test_a_renamed_flag_has_the_value_that_it_was_given() -> None:
    assert read("--layernorm-epsilon 1e-6")["layernorm_epsilon"] == 1e-6
    assert read("--use-custom-fsdp")["use_megatron_fsdp"] is True
    assert read("--distribute-checkpointed-activations")["distribute_saved_activations"] is True


@pytest.mark.parametrize(
    ("flag", "works"),
    [
        (
            "--standalone-embedding-stage",
            "give --pipeline-model-parallel-layout, whose first stage may be the embedding",
        ),
        ("--embedding-weights-in-fp32", "--fp32-residual-connection keeps the output of the embedding in float32"),
        ("--renormalize-blend-weights", "the weights of a blend are used as they are given"),
    ],
)
def test_a_retired_flag_that_would_change_the_run_is_refused(flag: str, works: str) -> None:
    (problem,) = read_command_line([flag]).problems
    assert problem.startswith(f"{flag}: retired: ") and works in problem


def test_the_embedding_can_be_a_stage_of_its_own_as_a_refusal_says() -> None:
    layout = REFUSED["--standalone-embedding-stage"].partition("such as ")[2].partition(" ")[0]
    flags = f"--num-layers 12 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout {layout}"
    assert configured(flags, ranks=4).transformer.pipeline_model_parallel_layout is not None
