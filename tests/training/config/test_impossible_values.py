"""Impossible values of the parts of a config are named, each in one line."""

import signal

import pytest
from support.command_lines import problems_of_config

from megatron.data.tokenizer.config import TokenizerConfig
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig
from megatron.training.config.log import KINDS, LoggingConfig, RecordsConfig
from megatron.training.config.model import ModelConfig
from megatron.training.config.parallel import ParallelConfig
from megatron.training.config.resilience import FaultInjectorConfig, ResilienceConfig
from megatron.training.config.schedule import ScheduleConfig
from megatron.training.config.training import EvaluationConfig, TrainingConfig

GOOD: dict[type, dict[str, object]] = {
    CheckpointConfig: {"save": "x"},
    DataConfig: {"seq_length": 8, "mock_data": True},
    LoggingConfig: {},
    ModelConfig: {"transformer": None, "max_position_embeddings": 8},
    ParallelConfig: {},
    ResilienceConfig: {},
    ScheduleConfig: {},
    TrainingConfig: {"micro_batch_size": 2, "global_batch_size": 16, "train_iters": 3},
    EvaluationConfig: {},
    FaultInjectorConfig: {},
    RecordsConfig: {},
    TokenizerConfig: {"tokenizer_type": "NullTokenizer", "vocab_size": 10},
}
"""Values without a problem."""

RULES: list[tuple[type, dict[str, object], str]] = [
    (CheckpointConfig, {"save_interval": 0}, "--save-interval 0 must be at least 1"),
    (CheckpointConfig, {"keep_last": 0}, "--keep-last 0 must be at least 1"),
    (CheckpointConfig, {"load": "x", "ckpt_step": -1}, "--ckpt-step -1 must be at least 0"),
    (CheckpointConfig, {"finetune": True}, "--finetune needs --load: the folder to load from"),
    (CheckpointConfig, {"non_persistent_save_interval": 0}, "--non-persistent-save-interval 0 must be at least 1"),
    (
        CheckpointConfig,
        {"non_persistent_save_interval": 2, "non_persistent_global_ckpt_dir": "./x"},
        "--non-persistent-global-ckpt-dir ./x is the folder of --save",
    ),
    (
        CheckpointConfig,
        {"load": "x", "finetune": True, "override_ckpt_iteration": 3},
        "--override-ckpt-iteration 3: with --finetune a run begins at iteration 0",
    ),
    (DataConfig, {"seq_length": 0}, "--seq-length 0 must be at least 1"),
    (DataConfig, {"num_workers": -1}, "--num-workers -1 must be at least 0"),
    (
        DataConfig,
        {"num_workers": 9999999},
        "--num-workers 9999999: each rank would start so many processes; at most 1024",
    ),
    (DataConfig, {"data_path": ["x"]}, "--data-path and --mock-data say in 2 ways where data is; give one"),
    (DataConfig, {"mock_data": False, "data_path": []}, "--data-path: a prefix is missing"),
    (
        DataConfig,
        {"mock_data": False, "valid_data_path": ["x"], "split": "9,1,0"},
        "--split 9,1,0 does not go with --valid-data-path",
    ),
    (DataConfig, {"split": "90,20,x"}, "--split 90,20,x: 'x' is not a number"),
    (LoggingConfig, {"log_interval": 0}, "--log-interval 0 must be at least 1"),
    (LoggingConfig, {"profile_step_start": -1}, "--profile-step-start -1 must be at least 0"),
    (
        LoggingConfig,
        {"profile": True, "profile_step_end": 5},
        "--profile-step-end 5 must be larger than --profile-step-start 10",
    ),
    (ModelConfig, {"max_position_embeddings": 0}, "--max-position-embeddings 0 must be at least 1"),
    (ModelConfig, {"rotary_base": 0}, "--rotary-base 0 must be at least 1"),
    (ModelConfig, {"swiglu": True, "geglu": True}, "--swiglu and --geglu choose different activations; give one"),
    (ParallelConfig, {"distributed_timeout_minutes": 0}, "--distributed-timeout-minutes 0 must be at least 1"),
    (
        ParallelConfig,
        {"num_virtual_stages_per_pipeline_rank": 0},
        "--num-virtual-stages-per-pipeline-rank 0 must be at least 1",
    ),
    (ResilienceConfig, {"error_injection_rate": -1}, "--error-injection-rate -1 must be at least 0"),
    (ResilienceConfig, {"loss_spike_z_score": 0.0}, "--loss-spike-z-score 0.0 must be above 0"),
    (ResilienceConfig, {"loss_spike_history": 1}, "--loss-spike-history 1 must be at least 2"),
    (ResilienceConfig, {"loss_spike_limit": 0}, "--loss-spike-limit 0 must be at least 1"),
    (ResilienceConfig, {"loss_spike_rewind_window": 0}, "--loss-spike-rewind-window 0 must be at least 1"),
    (ResilienceConfig, {"exit_signal": signal.SIGKILL}, "--exit-signal SIGKILL cannot be caught by any program"),
    (ScheduleConfig, {"lr_decay_iters": 0}, "--lr-decay-iters 0 must be at least 1"),
    (ScheduleConfig, {"lr_warmup_iters": -1}, "--lr-warmup-iters -1 must be at least 0"),
    (ScheduleConfig, {"lr_warmup_fraction": 1.0}, "--lr-warmup-fraction 1.0 must be at least 0 and less than 1"),
    (
        ScheduleConfig,
        {"lr_warmup_fraction": 0.1, "lr_warmup_samples": 3},
        "--lr-warmup-fraction 0.1 and --lr-warmup-samples 3 say how long to warm up in 2 ways",
    ),
    (
        ScheduleConfig,
        {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1},
        "--weight-decay-incr-style cosine needs --end-weight-decay",
    ),
    (
        ScheduleConfig,
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.05},
        "--end-weight-decay 0.05 is less than --start-weight-decay 0.1",
    ),
    (
        ScheduleConfig,
        {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict",
    ),
    (TrainingConfig, {"micro_batch_size": 0}, "--micro-batch-size 0 must be at least 1"),
    (TrainingConfig, {"exit_interval": 0}, "--exit-interval 0 must be at least 1"),
    (TrainingConfig, {"train_samples": 15}, "--train-samples 15 is less than one batch of --global-batch-size 16"),
    (
        TrainingConfig,
        {"train_samples": 99, "rampup_batch_size": [4, 0, 100]},
        "--rampup-batch-size 4 0 100: start, increment and samples must be at least 1",
    ),
    (
        TrainingConfig,
        {"train_samples": 99, "rampup_batch_size": [16, 4, 100]},
        "--rampup-batch-size 16 4 100 begins at or above --global-batch-size 16",
    ),
    (
        TrainingConfig,
        {"train_samples": 99, "rampup_batch_size": [2, 4, 100]},
        "--rampup-batch-size 2 4 100: from 2 in steps of 4 the batch does not reach --global-batch-size 16; it reaches "
        "14 or 18",
    ),
    (EvaluationConfig, {"eval_interval": 0}, "--eval-interval 0 must be at least 1"),
    (EvaluationConfig, {"eval_iters": -1}, "--eval-iters -1 must be at least 0"),
    (EvaluationConfig, {"skip_train": True, "eval_iters": 0}, "--skip-train with --eval-iters 0 leaves nothing to do"),
    (
        TokenizerConfig,
        {"tokenizer_type": None},
        "--vocab-file and --merge-file: GPT2BPETokenizer needs both; --tokenizer-type",
    ),
    (
        TokenizerConfig,
        {"tokenizer_type": "HuggingFaceTokenizer"},
        "--tokenizer-model: HuggingFaceTokenizer needs a tokenizer.json, or a folder with one",
    ),
    (TokenizerConfig, {"tokenizer_type": "TikTokenizer"}, "--tokenizer-model: TikTokenizer needs a .json file"),
    (TokenizerConfig, {"tokenizer_type": "BertWordPieceCase"}, "--vocab-file: BertWordPieceCase needs a vocab.txt"),
    (TokenizerConfig, {"vocab_size": None}, "--vocab-size: NullTokenizer needs it"),
    (TokenizerConfig, {"vocab_size": 0}, "--vocab-size 0: must be at least 1"),
    (TokenizerConfig, {"null_tokenizer_eod_id": 11}, "--null-tokenizer-eod-id 11: must be from 0 to --vocab-size 10"),
    (
        TokenizerConfig,
        {"null_tokenizer_pad_id": -2},
        "--null-tokenizer-pad-id -2: must be -1 (none) or from 0 to --vocab-size 10",
    ),
    (TokenizerConfig, {"vocab_extra_ids": 3}, "--vocab-extra-ids 3: NullTokenizer has no extra ids"),
    (TokenizerConfig, {"tiktoken_num_special_tokens": 0}, "--tiktoken-num-special-tokens 0: must be at least 1"),
]
"""A part, values beside the good ones, and how the problem begins."""


@pytest.mark.parametrize(("part", "values", "problem"), RULES)
def test_impossible_values(part: type, values: dict[str, object], problem: str) -> None:
    (found,) = problems_of_config(part, **{**GOOD[part], **values})
    assert found.startswith(problem), found


@pytest.mark.parametrize("part", GOOD)
def test_possible_values_are_no_problem(part: type) -> None:
    assert problems_of_config(part, **GOOD[part]) == []


def test_the_paths_of_single_splits_are_one_source() -> None:
    config = DataConfig(seq_length=8, train_data_path=["a"], valid_data_path=["b"])
    assert config.sources() == ["train_data_path"]


@pytest.mark.parametrize("kind", KINDS)
def test_intervals(kind: str) -> None:
    flag = f"--save-{kind.replace('_', '-')}-interval"
    field = f"save_{kind}_interval"
    assert problems_of_config(RecordsConfig, **{field: 0}) == [f"{flag} 0 must be at least 1"]
    assert RecordsConfig(**{field: 3}).interval(kind) == 3 and RecordsConfig().interval(kind) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"types": "hang,melt"}, "--fault-injector-fault-types hang,melt: melt is none of exception, hang"),
        ({"fault_delay": None}, "--fault-injector-fault-types hang: give --fault-injector-fault-delay or"),
        ({"mtti_seconds": 1.0}, "--fault-injector-fault-types hang: give --fault-injector-fault-delay or"),
        ({"num_ranks": 0}, "--fault-injector-num-ranks 0 must be at least 1"),
        ({"ranks": "1", "num_ranks": 1}, "--fault-injector-ranks 1 and --fault-injector-num-ranks 1 both say"),
        ({"ranks": "1,x"}, "--fault-injector-ranks 1,x: not whole numbers"),
        ({"ranks": "-1"}, "--fault-injector-ranks -1: ranks count from 0"),
        ({"fault_probabilities": "a"}, "--fault-injector-fault-probabilities a: not numbers"),
        ({"fault_probabilities": "1,2"}, "--fault-injector-fault-probabilities 1,2: give one weight for each"),
        ({"fault_probabilities": "0"}, "--fault-injector-fault-probabilities 0: give one weight for each"),
    ],
)
def test_impossible_faults_are_named(values: dict[str, object], problem: str) -> None:
    given = {"types": "hang", "fault_delay": 1.0, **values}
    types = {"fault_injector_fault_types": given.pop("types")}
    found = problems_of_config(FaultInjectorConfig, **types, **{f"fault_injector_{k}": v for k, v in given.items()})
    assert len(found) == 1 and found[0].startswith(problem), found
