"""--deepspeed_config: examples as they are published mean the flags that they stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_lines import configured, problems_of
from support.runs import GPT, run_script, train, train_on_ranks

from megatron.training.config.foreign.answers import Answer
from megatron.training.config.foreign.deepspeed import DEEPSPEED, read_deepspeed
from megatron.training.inspection.run_description import command_line_of

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --mock-data "
    "--num-workers 0 --tokenizer-type NullTokenizer --vocab-size 40 --eval-iters 0 --hidden-dropout 0 "
    "--attention-dropout 0 --train-iters 2000 --exit-interval 2"
)
ADAM = {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
ADAM_FLAGS = "--optimizer adam --adam-beta1 0.8 --adam-beta2 0.999 --adam-eps 1e-8 --weight-decay 3e-7"
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}}
WARMUP_FLAGS = "--lr 0.001 --lr-decay-style constant --lr-warmup-iters 1000 --lr-warmup-style log"
FP16 = {
    "enabled": True, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000,
    "hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1,
}  # fmt: skip

EXAMPLES: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: the file, flags beside it, flags that it stands for
    "page": (
        {
            "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1, "optimizer": ADAM,
            "scheduler": WARMUP, "gradient_clipping": 1.0, "wall_clock_breakdown": False, "zero_optimization":
            {"stage": 1, "reduce_bucket_size": 5e8, "overlap_comm": False, "contiguous_gradients": True},
        },
        "",
        f"--global-batch-size 8 --micro-batch-size 4 --log-interval 1 {ADAM_FLAGS} {WARMUP_FLAGS} --clip-grad 1.0 "
        "--use-distributed-optimizer --ddp-bucket-size 500000000",
    ),
    "zero2-offload": (
        {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "optimizer": ADAM,
            "bf16": {"enabled": True}, "zero_optimization": {
                "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "allgather_partitions": True,
                "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True,
                "reduce_bucket_size": 2e8, "contiguous_gradients": True,
            },
        },
        "",
        f"--micro-batch-size 2 --gradient-accumulation-steps 4 {ADAM_FLAGS} --lr 0.001 --bf16 --overlap-grad-reduce "
        "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads "
        "--optimizer-cpu-offload --ddp-bucket-size 200000000",
    ),
    "zero3-auto": (
        {
            "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}, "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
            "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(
                ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")},
            "zero_optimization": {
                "stage": 3, "offload_optimizer": {"device": "none", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True,
                "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
        },
        "--lr 1e-3 --micro-batch-size 2 --lr-warmup-iters 10",
        "--lr-decay-style linear --lr-warmup-style log --use-distributed-optimizer --use-megatron-fsdp "
        "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --log-interval 2000",
    ),
    "cosine": (
        {
            "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.002}}, "scheduler": {
                "type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_min_ratio": 0.1,
                                                     "cos_min_ratio": 0.25, "warmup_num_steps": 10,
                                                     "warmup_type": "linear"}},
            "pipeline": {"stages": "auto", "activation_checkpoint_interval": 1},
            "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1},
        },
        "",
        "--global-batch-size 8 --gradient-accumulation-steps 1 --weight-decay 0 --lr 0.002 --lr-decay-style cosine "
        "--lr-warmup-iters 10 --lr-decay-iters 1000 --lr-warmup-init 0.0002 --min-lr 0.0005 --recompute-granularity "
        "full --recompute-method uniform --recompute-num-layers 1 --log-throughput",
    ),
    "fp16-parallel": (
        {
            "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
            "fp16": FP16, "optimizer": ADAM, "tensor_parallel": {"autotp_size": 1}, "comms_logger": {"enabled": True},
            "tensorboard": {"enabled": False, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        },
        "",
        "--global-batch-size 16 --micro-batch-size 4 --gradient-accumulation-steps 4 --fp16 --initial-loss-scale 65536 "
        f"{ADAM_FLAGS} --lr 0.001 --timing-log-level 2",
    ),
}  # fmt: skip


def written(folder: Path, config: object) -> str:
    path = folder / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return f"--deepspeed_config {path}"


def test_state_on_a_local_disk(tmp_path: Path) -> None:
    place = {"device": "nvme", "nvme_path": "/local", "buffer_count": 4, "pipeline_read": True, "pin_memory": False}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM}
    config["zero_optimization"] = {"stage": 2, "offload_optimizer": place}
    read = configured(written(tmp_path, config), base=BASE).optimizer
    assert read.optimizer_cpu_offload and read.optimizer_nvme_offload_path == "/local" and not read.pin_cpu_params


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_means_its_flags(name: str, tmp_path: Path) -> None:
    config, beside, flags = EXAMPLES[name]
    read = configured(f"{beside} {written(tmp_path, config)}", base=BASE)
    expected = configured(f"{beside} {flags}", base=BASE)

    def values(config: Any) -> dict[str, Any]:
        return {field: value for field, value in config.flat().items() if field != "deepspeed_config"}

    assert values(read) == values(expected)
    again = configured(" ".join(command_line_of(read)), base="")  # what a checkpoint says about the run
    assert values(again) == values(read)


@pytest.mark.parametrize(
    "name", [name if name == "page" else pytest.param(name, marks=pytest.mark.slow) for name in EXAMPLES]
)
def test_an_example_dry_runs_and_trains_as_its_flags(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, beside, flags = EXAMPLES[name]
    file = written(tmp_path, config)
    run_script(f"{beside} {file} --dry-run", GPT, base=BASE)
    assert "a step      8 samples" in capsys.readouterr().out or name != "page"
    read = train(f"{beside} {file}", base=BASE)
    expected = train(f"{beside} {flags}", base=BASE)
    assert len(read.losses) == 2 and read.losses == expected.losses
    assert all(read.weights[one].equal(expected.weights[one]) for one in expected.weights)


@pytest.mark.slow
def test_an_example_trains_on_two_ranks_as_its_flags(tmp_path: Path) -> None:
    config, beside, flags = EXAMPLES["zero2-offload"]
    read = train_on_ranks(f"{beside} {written(tmp_path, config)}", 2, base=BASE)
    expected = train_on_ranks(f"{beside} {flags}", 2, base=BASE)
    assert [rank.losses for rank in read] == [rank.losses for rank in expected] and read[-1].losses


def test_every_published_key_has_an_answer() -> None:
    """The list has the keys of the published page, and those of the config classes of release 0.19."""
    keys = (Path(__file__).parents[3] / "data/frameworks/deepspeed_keys.txt").read_text().split()
    assert len(keys) == len(set(keys))

    def answered(key: str) -> bool:
        parts = key.split(".")
        return any(".".join(parts[:count]) in DEEPSPEED for count in range(1, len(parts) + 1))

    assert [key for key in keys if not answered(key)] == []
    for name, answer in DEEPSPEED.items():
        assert isinstance(answer, Answer) and answer.text, name


@pytest.mark.parametrize(
    ("config", "flags", "says"),
    [
        ({"zero_optimisation": {"stage": 1}}, "", "zero_optimisation: unknown; did you mean zero_optimization"),
        ({"zero_optimization": {"stages": 1}}, "", "zero_optimization.stages: unknown; did you mean stage"),
        ({"fp16": {"enabled": False, "los_scale": 1}}, "", "fp16.los_scale: unknown; did you mean loss_scale"),
        ({"zero_optimization": {"stage": 4}}, "", "zero_optimization.stage 4: choose from 0, 1, 2, 3"),
        ({"zero_optimization": 1}, "", "zero_optimization 1: expected an object with the keys of this section"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}}},
            "",
            "--param-nvme-offload-path /n keeps weights that ranks share: give at least two data parallel ranks",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "",
            "zero_optimization.offload_optimizer.device nvme: needs nvme_path, a folder on a local disk",
        ),
        ({"optimizer": {"type": "Lamb"}}, "", "optimizer.type Lamb: there is no LAMB"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "", "adam_w_mode false: weight decay acts"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "", "scheduler.type OneCycle: there are no cycles"),
        ({"gradient_clipping": "one"}, "", "gradient_clipping one: expected a number"),
        ({"gradient_clipping": 0.5}, "--clip-grad 1.0", "--clip-grad 1.0 contradicts"),
        ({"bf16": {"enabled": False}}, "--bf16", "--bf16 contradicts"),
        ({"zero_optimization": {"stage": 0}}, "--use-distributed-optimizer", "(no --use-distributed-optimizer)"),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            "",
            "--gradient-accumulation-steps 4 x --micro-batch-size 2 x 1 data parallel ranks is 8, but "
            "--global-batch-size 32; leave one of the three out",
        ),
        ({"data_efficiency": {"enabled": True}}, "", "data_efficiency {'enabled': True}: there are no curricula"),
        ({"communication_data_type": "fp16", "bf16": {"enabled": True}}, "", "in the model's type, bf16"),
        ('{"fp16": {"enabled": false},}', "", "ds.json:1: "),
        ('{"bf16": {}, "bf16": {}}', "", "ds.json: bf16 is given twice"),
        ("[]", "", "ds.json: expected names and values"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(config: object, flags: str, says: str, tmp_path: Path) -> None:
    problems = problems_of(f"{written(tmp_path, config)} {flags}", base=f"{BASE} --lr 1e-3")
    assert len([problem for problem in problems if "micro-batch-size is missing" not in problem]) == 1, problems
    assert any(says in problem for problem in problems) and any("--" in problem for problem in problems), problems


def test_a_section_that_is_switched_off_asks_for_nothing() -> None:
    off = {name: {"enabled": False} for name in ("amp", "data_efficiency", "elasticity", "autotuning", "fp16", "wandb")}
    reading = read_deepspeed({**off, "aio": {}, "zero_optimization": {"stage": 0}}, "x")
    assert not reading.problems and not reading.lines()
    settings = {(one.field, one.value) for one in reading.settings}
    assert settings == {("use_distributed_optimizer", False), ("fp16", False)}


def test_lines_say_what_has_no_effect_and_what_is_left_to_flags() -> None:
    reading = read_deepspeed(
        {
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": 3, "sub_group_size": 1e9, "stage3_max_live_parameters": 5},
            "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2}},
        },
        "F",
    )
    lines = "\n".join(reading.lines())
    assert "F: no effect of zero_optimization.sub_group_size: " in lines
    assert "F: no effect of zero_optimization.stage3_max_live_parameters: " in lines
    assert "auto, so flags and their defaults decide: gradient_clipping" in lines
    assert "optimizer.params.lr 0.1: has no effect: scheduler.params.warmup_max_lr is 0.2" in lines


def test_defaults_of_deepspeed_give_way_to_flags(tmp_path: Path) -> None:
    file = written(tmp_path, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "train_batch_size": 8})
    assert configured(file, base=BASE).optimizer.weight_decay == 0.0  # not 0.01, as without the file
    config = configured(f"{file} --weight-decay 0.5 --micro-batch-size 2", base=BASE)
    assert config.optimizer.weight_decay == 0.5 and config.training.gradient_accumulation_steps is None
    assert configured(file, base=BASE, ranks=4).training.micro_batch_size == 2


def test_the_flag_has_the_spellings_of_scripts(tmp_path: Path) -> None:
    file = written(tmp_path, {"gradient_clipping": 0.25}).split()[1]
    for words in (f"--deepspeed {file}", f"--deepspeed-config {file}", f"--deepspeed --deepspeed_config={file}"):
        assert configured(f"{words} --lr 1e-3 --micro-batch-size 1", base=BASE).optimizer.clip_grad == 0.25


def test_words_that_mean_true_switch_a_section_on() -> None:
    found = read_deepspeed({"fp16": {"enabled": "True", "loss_scale": 128}, "elasticity": {"enabled": "False"}}, "x")
    assert not found.problems and {"loss_scale", "fp16"} <= {one.field for one in found.settings}


def test_a_problem_of_a_value_names_the_key_that_says_it(tmp_path: Path) -> None:
    file = written(tmp_path, {"steps_per_print": 0, "scheduler": {"type": "WarmupLR"}})
    base = f"{BASE} --lr 1e-3 --micro-batch-size 1 --train-iters 9"
    problems = problems_of(file, base=base)
    assert any(problem.endswith("ds.json: steps_per_print)") and "(from --" in problem for problem in problems)
    assert any(problem.endswith(": scheduler.params.warmup_num_steps, by default)") for problem in problems)
    assert not any("(from" in problem for problem in problems_of("--log-interval 0", base=base))


def test_a_byte_order_mark_is_no_mistake_and_an_empty_file_is(tmp_path: Path) -> None:
    (tmp_path / "marked.json").write_text('\ufeff{"gradient_clipping": 0.5}', "utf-8")
    base = f"{BASE} --lr 1e-3 --micro-batch-size 1"
    assert configured(f"--deepspeed_config {tmp_path}/marked.json", base=base).optimizer.clip_grad == 0.5
    (tmp_path / "empty.json").write_text("\n")
    (problem,) = problems_of(f"--deepspeed_config {tmp_path}/empty.json", base=base)
    assert problem.endswith("empty.json: the file is empty")
