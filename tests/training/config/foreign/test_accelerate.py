"""--accelerate_config: files of `accelerate config` and plugins mean the flags that they stand for."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command_lines import configured, problems_of

from megatron.core.exceptions import UserError
from megatron.training.config.foreign.accelerate import ACCELERATE, read_accelerate, read_plugin

BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 40 --micro-batch-size 1 --lr 1e-3 --train-iters 10"
)
LAUNCH = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False,
    "machine_rank": 0, "main_training_function": "main", "num_machines": 1, "num_processes": 8,
    "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False,
    "use_cpu": False,
}  # fmt: skip
PLANNED = "--planned-world-size 8"

EXAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "megatron": (
        {
            "distributed_type": "MEGATRON_LM", "deepspeed_config": {}, "fsdp_config": {}, "dynamo_backend": "NO",
            "mixed_precision": "bf16", "megatron_lm_config": {
                "megatron_lm_gradient_clipping": 1.0, "megatron_lm_num_micro_batches": 2, "megatron_lm_pp_degree": 2,
                "megatron_lm_recompute_activations": True, "megatron_lm_sequence_parallelism": True,
                "megatron_lm_tp_degree": 2, "megatron_lm_use_distributed_optimizer": True,
            },
        },
        f"{PLANNED} --bf16 --gradient-accumulation-steps 2 --pipeline-model-parallel-size 2 --recompute-activations "
        "--sequence-parallel --tensor-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "deepspeed": (
        {
            "distributed_type": "DEEPSPEED", "mixed_precision": "no", "deepspeed_config": {
                "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "offload_optimizer_device": "cpu",
                "offload_param_device": "none", "zero3_init_flag": False, "zero3_save_16bit_model": False,
                "zero_stage": 2, "deepspeed_multinode_launcher": "standard",
            },
        },
        f"{PLANNED} --gradient-accumulation-steps 4 --clip-grad 0.5 --optimizer-cpu-offload "
        "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
    ),
    "fsdp1": (
        {
            "distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE",
                "fsdp_forward_prefetch": False, "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False,
                "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_sync_module_states": True, "fsdp_use_orig_params": True, "fsdp_activation_checkpointing": True,
            },
        },
        f"{PLANNED} --bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --recompute-granularity "
        "full --recompute-method uniform --recompute-num-layers 1",
    ),
    "fsdp2-parallelism": (
        {
            "distributed_type": "FSDP", "mixed_precision": "fp8", "fsdp_config": {
                "fsdp_version": 2, "fsdp_reshard_after_forward": True,
                "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            },
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2,
                "parallelism_config_tp_size": 2, "parallelism_config_cp_size": 1,
            },
            "fp8_config": {"fp8_format": "E4M3", "backend": "TE", "margin": 0},
        },
        f"{PLANNED} --bf16 --fp8-format e4m3 --use-megatron-fsdp --data-parallel-sharding-strategy "
        "optim_grads_params --tensor-model-parallel-size 2 --num-distributed-optimizer-instances 2",
    ),
}  # fmt: skip


def written(folder: Path, config: object, name: str = "config.yaml") -> str:
    path = folder / name
    text = json.dumps(config) if name.endswith(".json") else yaml.safe_dump(config)
    path.write_text(config if isinstance(config, str) else text)
    return f"--accelerate_config {path}"


@pytest.mark.parametrize("form", ["config.yaml", "config.json"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_file_means_its_flags(name: str, form: str, tmp_path: Path) -> None:
    config, flags = EXAMPLES[name]
    read = configured(written(tmp_path, LAUNCH | config, form), base=BASE, ranks=8)
    expected = configured(flags, base=BASE, ranks=8)

    def values(config: Any) -> dict[str, Any]:
        return {field: value for field, value in config.flat().items() if field != "accelerate_config"}

    assert values(read) == values(expected)


def test_the_json_of_deepspeed_that_a_file_names_is_read(tmp_path: Path) -> None:
    named = tmp_path / "ds.json"
    named.write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": 0.25}))
    section = {"deepspeed_config_file": str(named), "zero3_init_flag": True}
    file = written(tmp_path, {"distributed_type": "DEEPSPEED", "deepspeed_config": section})
    config = configured(file, base=BASE)
    assert config.optimizer.clip_grad == 0.25 and config.optimizer.use_distributed_optimizer
    (problem,) = problems_of(f"{file} --clip-grad 1.0", base=BASE)
    assert "--clip-grad 1.0 contradicts" in problem and f"deepspeed_config_file {named}: gradient_clipping" in problem


@pytest.mark.parametrize(
    ("config", "flags", "says"),
    [
        ({"distributed_type": "MEGATRON"}, "", "distributed_type MEGATRON: choose from MEGATRON_LM, DEEPSPEED, FSDP"),
        ({"mixed_precison": "bf16"}, "", "mixed_precison: unknown; did you mean mixed_precision"),
        (
            {"megatron_lm_config": {"megatron_lm_tp_degre": 2}},
            "",
            "megatron_lm_config.megatron_lm_tp_degre: unknown; did you mean tp_degree",
        ),
        ({"megatron_lm_config": {"tp_degree": "two"}}, "", "megatron_lm_config.tp_degree two: expected a number"),
        (
            {"megatron_lm_config": {"custom_loss_function": "f"}},
            "",
            "custom_loss_function f: the training loop is ours",
        ),
        ({"deepspeed_config": {"zero_stage": 7}}, "", "deepspeed_config.zero_stage 7: choose from 0, 1, 2, 3"),
        (
            {"deepspeed_config": {"offload_param_device": "nvme", "zero_stage": 3}},
            "",
            "param_device nvme: needs",
        ),
        ({"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, "", "--num-distributed-optimizer-instances"),
        ({"mixed_precision": "no"}, "--bf16", "--bf16 contradicts"),
        ({"megatron_lm_config": {"tp_degree": 1}}, "--tensor-model-parallel-size 2", "megatron_lm_config.tp_degree"),
        ({"megatron_lm_config": {"tp_degree": 1, "megatron_lm_tp_degree": 2}}, "", "tp_degree is given twice"),
        (
            {"megatron_lm_config": {"other_megatron_args": {"num_layers": "x"}}},
            "--num-layers 2",
            "num_layers: x: expec",
        ),
        ({"megatron_lm_config": {"other_megatron_args": [1]}}, "", "other_megatron_args [1]: expected fields"),
        ({"fsdp_config": {"fsdp_offload_params": "yes please"}}, "", "offload_params yes please: expected true or"),
        ("", "", "config.yaml: the file is empty"),
        ("a: [", "", "config.yaml:1: "),
        ("- a", "", "config.yaml: expected names and values"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_field(config: object, flags: str, says: str, tmp_path: Path) -> None:
    (problem,) = problems_of(f"{written(tmp_path, config)} {flags}", base=BASE, ranks=2)
    assert says in problem and str(tmp_path) in problem


def test_other_arguments_are_flags() -> None:
    arguments = {"no_load_optim": True, "num_layers": 6, "bias_gelu_fusion_": 1}
    reading = read_accelerate({"megatron_lm_config": {"other_megatron_args": arguments}}, "F")
    assert {one.field: one.value for one in reading.settings} == {"no_load_optim": True, "num_layers": 6}
    assert reading.problems == [
        "F: megatron_lm_config.other_megatron_args.bias_gelu_fusion_: no such flag; --help all lists all"
    ]


def test_every_field_of_the_installed_release_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, MegatronLMPlugin

    assert accelerate.__version__
    classes = {
        "": ClusterConfig,
        "megatron_lm_config.": MegatronLMPlugin,
        "deepspeed_config.": DeepSpeedPlugin,
        "fsdp_config.": FullyShardedDataParallelPlugin,
        "parallelism_config.": accelerate.ParallelismConfig,
    }
    sections = {name.partition(".")[0] for name in ACCELERATE if "." in name}
    for section, kind in classes.items():
        fields = [f"{section}{field.name}" for field in dataclasses.fields(kind) if not field.name.startswith("_")]
        assert [name for name in fields if name not in ACCELERATE and name not in sections] == []


def test_a_plugin_object_is_read() -> None:
    accelerate = pytest.importorskip("accelerate")
    plugin = accelerate.utils.MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4, gradient_clipping=0.5)
    reading = read_plugin(plugin)
    settings = {one.field: one.value for one in reading.settings}
    assert not reading.problems
    assert settings["tensor_model_parallel_size"] == settings["pipeline_model_parallel_size"] == 2
    assert settings["gradient_accumulation_steps"] == 4 and settings["clip_grad"] == 0.5
    with pytest.raises(UserError, match="int: expected one of MegatronLMPlugin"):
        read_plugin(3)


def test_real_plugins_are_read() -> None:
    utils = pytest.importorskip("accelerate.utils")
    fields = {one.field: one.value for one in read_plugin(utils.DeepSpeedPlugin(zero_stage=3)).settings}
    assert fields["data_parallel_sharding_strategy"] == "optim_grads_params" and fields["log_interval"] == 10**9
    for version in (1, 2):
        for offload in (True, False):
            plugin = utils.FullyShardedDataParallelPlugin(fsdp_version=version, cpu_offload=offload)
            reading = read_plugin(plugin)
            assert not reading.problems
            assert ("optimizer_cpu_offload" in {one.field for one in reading.settings}) is offload


def test_a_field_beside_the_file_that_decides_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    section = {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero_stage": 3}
    (problem,) = read_accelerate({"distributed_type": "DEEPSPEED", "deepspeed_config": section}, "F").problems
    assert problem == f"F: deepspeed_config.zero_stage 3: {tmp_path}/ds.json decides; set it there, and leave it out"
