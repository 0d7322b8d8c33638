"""Values that follow from other values, and notes about them."""

from pathlib import Path

import pytest
import torch
from support.command_lines import SMALL, configured, problems_of, without
from support.fake_transformer_engine import FAKE

from megatron.core.transformer.config.heterogeneous import HETEROGENEOUS
from megatron.training.config import derived_values
from megatron.training.inspection.run_description import command_line_of


@pytest.mark.parametrize(("hidden", "ffn"), [(64, 128), (4096, 10880), (768, 2048)])
def test_swiglu_shrinks_the_mlp_to_a_multiple_of_64(hidden: int, ffn: int) -> None:
    assert configured(f"--swiglu --hidden-size {hidden}").transformer.ffn_hidden_size == ffn
    assert configured("--swiglu --ffn-hidden-size 100").transformer.ffn_hidden_size == 100


def test_dist_muon_shards_the_optimizers_state() -> None:
    assert configured("--optimizer dist_muon", ranks=2).ddp.use_distributed_optimizer
    assert not configured("--optimizer muon --muon-use-nesterov", ranks=2).ddp.use_distributed_optimizer


def test_query_groups_count_only_with_their_switch() -> None:
    assert configured("--num-query-groups 2").transformer.num_query_groups == 4
    assert configured("--group-query-attention --num-query-groups 2").transformer.num_query_groups == 2
    assert configured("--group-query-attention").transformer.num_query_groups == 1


def test_flags_keep_the_content_of_a_description(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text('{"rope_theta": 5, "block_configs": [{}, {"ffn": {"no_op": true}}]}')
    given = ["--heterogeneous-layers-config-encoded-json", '{"block_configs":[{},{"ffn":{"no_op":true}}]}']
    config = configured(f"--heterogeneous-layers-config-path {path}")
    assert config.flat()["heterogeneous_layers_config_path"] == str(path), "which scripts of Megatron-LM read"
    words = command_line_of(config)
    assert words[words.index(given[0]) : words.index(given[0]) + 2] == given and str(path) not in words
    path.unlink()
    again = configured(f"{' '.join(given)} --heterogeneous-layers-config-path {path}")
    assert command_line_of(again) == words
    note = "--heterogeneous-layers-config-path: not read beside --heterogeneous-layers-config-encoded-json"
    assert note in again.notes and note not in config.notes
    assert configured(" ".join(given).replace(":[{},", ':[{"ffn":{}},')).provenance[HETEROGENEOUS[0]] == "flag"


def test_a_description_without_the_sizes_of_the_model_leaves_their_errors() -> None:
    blocks = '{"block_configs":[{"attention":{"n_heads_in_group":2}},{"ffn":{"ffn_mult":1.0}}]}'
    for flag in ("--num-attention-heads", "--hidden-size", "--num-layers"):
        problems = problems_of(f"--heterogeneous-layers-config-encoded-json {blocks}", base=without(flag))
        assert len(problems) == 1 and problems[0].startswith(f"{flag} is missing"), problems


def test_number_formats() -> None:
    config = configured("--bf16")
    assert config.transformer.params_dtype is config.optimizer.params_dtype is torch.bfloat16
    assert config.optimizer.bf16 and config.ddp.grad_reduce_in_fp32
    assert not configured("--bf16 --grad-reduce-in-bf16").ddp.grad_reduce_in_fp32
    assert configured("--fp64").transformer.params_dtype is torch.float64


def test_ranks_and_batches() -> None:
    config = configured("--global-batch-size 32", ranks=8)
    assert config.grid.data == config.parallel.data_parallel_size == config.world_size == 8
    assert configured(ranks=8).training.global_batch_size == 16


def test_the_backend_follows_the_device() -> None:
    assert configured(has_cuda=True).parallel.distributed_backend == "nccl"
    assert configured("--distributed-backend gloo", has_cuda=True).parallel.distributed_backend == "gloo"
    config = configured("--distributed-backend nccl")
    assert config.parallel.distributed_backend == "gloo"
    assert "--distributed-backend nccl: this machine has no GPU; gloo is used" in config.notes


def test_the_length_in_samples() -> None:
    base = without("--train-iters")
    config = configured("--train-samples 101 --global-batch-size 4", base=base)
    assert config.training.train_iters == 25 and config.schedule.lr_decay_samples == 101
    assert config.schedule.lr_decay_iters is None


SMALL_WITHOUT_MICRO_BATCH = without("--train-iters").replace("--micro-batch-size 2", "")


def test_train_samples_are_trained_on_in_whole_steps_of_the_batches_that_are_read() -> None:
    def iterations(flags: str) -> int:
        base = without("--train-iters") + " --micro-batch-size 2"
        return configured(f"--train-samples 1000 {flags}", base=base, ranks=2).training.train_iters

    assert iterations("--global-batch-size 12") == 83
    rounded = "--global-batch-size 15 --decrease-batch-size-if-needed"
    assert iterations(rounded) == 83  # of 12 samples
    line = "--global-batch-size 15 is rounded down to 12, a multiple of --micro-batch-size 2 x 2 data parallel ranks"
    assert line in configured(f"{rounded} --micro-batch-size 2", ranks=2).notes
    assert not any("rounded down" in note for note in configured("--decrease-batch-size-if-needed").notes)
    assert iterations("--global-batch-size 16 --rampup-batch-size 4 4 100") == 72  # 9 of 4, 4 of 8, 3 of 12, 56 of 16
    steps = iterations("--global-batch-size 15 --rampup-batch-size 5 5 90 --decrease-batch-size-if-needed")
    assert steps == 12 + 6 + 75  # of 4 samples up to 45, of 8 up to 90, then of 12
    (problem,) = problems_of("--train-samples 1000 --global-batch-size 8", base=SMALL_WITHOUT_MICRO_BATCH)
    assert problem.startswith("--micro-batch-size is missing")


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


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "Transformer Engine computes; our own layers (--transformer-impl auto) are as fast"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
            "Transformer Engine computes, but not products in pieces (--tp-comm-overlap), which are ours; our own",
        ),
        ("--num-experts 4", "Transformer Engine computes; our own layers (--transformer-impl auto) are faster for exp"),
        ("--cuda-graph-impl local", "Transformer Engine is not used: its layers are not captured in CUDA graphs"),
        (
            "--bf16 --fp8-format hybrid --fp8-recipe delayed --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            "Transformer Engine is not used: with --fp8-recipe delayed its layers cannot be recomputed",
        ),
    ],
)
def test_the_start_says_who_computes(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived_values, "find_engine", lambda: FAKE)
    config = configured(f"--transformer-impl transformer_engine {flags}", ranks=2)
    (note,) = (note for note in config.notes if note.startswith("--transformer-impl transformer_engine: "))
    assert note.partition(": ")[2].startswith(expected)
    assert not any("Transformer Engine" in note for note in configured(flags, ranks=2).notes)


def test_other_names_of_one_size() -> None:
    base = without("--num-layers").replace("--seq-length", "--encoder-seq-length")
    config = configured("--encoder-num-layers 3", base=base)
    assert config.transformer.num_layers == 3 and config.data.seq_length == 128


def test_latent_attention_says_that_learned_positions_are_added() -> None:
    def told(flags: str) -> bool:
        return any(
            "learned_absolute adds learned positions" in note
            for note in configured(f"--multi-latent-attention {flags}").notes
        )

    assert told("") and not told("--position-embedding-type rope")
    assert not told("--position-embedding-type learned_absolute"), "who asks for it knows"


def test_defaults_that_are_not_megatron_lms_are_said_once() -> None:
    line = "defaults that differ from Megatron-LM's: --ckpt-format safetensors, --transformer-impl auto"
    assert configured(has_cuda=True).notes[0] == line
    muon = configured("--optimizer muon --tensor-model-parallel-size 2", ranks=2, has_cuda=True)
    assert muon.notes[0] == f"{line}, --muon-tp-mode distributed" and muon.optimizer.muon_tp_mode == "distributed"
    given = configured("--ckpt-format torch --transformer-impl local --distributed-backend gloo")
    assert not any("defaults that differ" in note for note in given.notes)


def test_a_negative_number_of_evaluations_is_none_and_a_line_says_so() -> None:
    config = configured("--eval-iters -1")
    assert config.evaluation.eval_iters == 0
    assert any("--eval-iters -1: the run never evaluates" in note for note in config.notes)


def test_a_module_that_no_layer_has_is_left_out_beside_others_and_a_line_says_so() -> None:
    experts = "--num-experts 4 --recompute-granularity selective --recompute-modules"
    config = configured(f"{experts} moe_act mlp")
    assert any("mlp has no effect: every layer has experts" in note for note in config.notes)
    (problem,) = problems_of(f"{experts} mlp")
    assert "mlp is a part of a layer without experts" in problem
