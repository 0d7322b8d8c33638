"""pretrain_t5.py: whole runs from flags in several layouts, checkpoints, and Megatron-LM's commands."""

import os
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.command_lines import megatron_lm_commands, smallest_world
from support.runs import Outcome, run_script

import pretrain_t5
from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.stage_map import stages_text
from megatron.core.transformer.enums import AttnBackend
from megatron.data.tokenizer.null import NullTokenizer
from megatron.diagnosis.memory.rank_memory import rank_memory
from megatron.training.arguments import configure
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.inspection.run_description import architecture_differences, architecture_of, command_line_of
from megatron.training.providers import Providers
from megatron.training.setup.sizes import resolve_auto_layout
from tools import generate

CORPUS = Path(__file__).parents[1] / "data" / "golden" / "corpus"
PROVIDERS = Providers(pretrain_t5.build_model, pretrain_t5.build_datasets, pretrain_t5.build_forward_step)
SIZES = "--hidden-size 32 --num-attention-heads 4 --encoder-seq-length 32 --decoder-seq-length 16 --micro-batch-size 2"
BASE = (
    f"{SIZES} --encoder-num-layers 2 --decoder-num-layers 2 --global-batch-size 4 --train-iters 4 --lr 1e-2 --fp64 "
    f"--num-workers 0 --log-interval 1 --eval-interval 4 --eval-iters 1 --split 80,10,10 --vocab-extra-ids 20 "
    f"--vocab-file {CORPUS}/bert/vocab.txt --data-path {CORPUS}/pp/bert_body_document "
    "--position-embedding-type relative --relative-attention-num-buckets 8 --relative-attention-max-distance 20"
)


def runs(flags: list[str], folder: str) -> list[Outcome]:
    """Trains each on this rank."""
    ranks = {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())} if dist.is_initialized() else {}
    base = f"{BASE} --data-cache-path {folder}"
    with mock.patch.dict(os.environ, ranks):  # as torchrun says it
        return [run_script(each, PROVIDERS, base=base, args_defaults=pretrain_t5.DEFAULTS) for each in flags]


def test_generate_writes_with_the_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs([f"--save {tmp_path}/kept --train-iters 1"], str(tmp_path / "cache"))
    words = ["--load", f"{tmp_path}/kept", "--prompt", "one <extra_id_0> two", "--max-new-tokens", "5"]
    assert generate.main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("one <extra_id_0> two ")
    assert generate.main([*words, "--no-echo", "--prompt", "a", "--top-k", "3"]) == 0
    assert not any("one" in line for line in capsys.readouterr().out.splitlines()[-2:-1])


# Flags ---------------------------------------------------------------------------------------------------------------

PLAIN = f"{SIZES} --lr 1e-3 --train-iters 2 --vocab-file {CORPUS}/bert/vocab.txt --data-path some/prefix"


def configured(flags: str, world_size: int = 1, base: str = PLAIN) -> Any:
    environment = LaunchEnvironment(world_size, False)
    return configure(f"{base} {flags}".split(), None, pretrain_t5.DEFAULTS, launch_environment=environment)


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--num-layers 3", (3, 3)),
        ("--num-layers 3 --decoder-num-layers 2", (3, 2)),
        ("--encoder-num-layers 4", (4, 4)),
        ("--encoder-num-layers 4 --decoder-num-layers 2", (4, 2)),
        ("--encoder-num-layers 4 --num-layers 2", (4, 2)),
    ],
)
def test_layers_of_the_two_stacks(flags: str, layers: tuple[int, int]) -> None:
    config = configured(flags)
    transformer, model = config.transformer, config.model
    assert (transformer.num_encoder_layers, transformer.num_layers) == layers
    assert (model.encoder_num_layers, model.decoder_num_layers) == layers
    assert config.decoder_seq_length == 16 and model.max_position_embeddings == 32


def test_stages_of_older_releases_are_counted_apart() -> None:
    config = configured(
        "--num-layers 4 --pipeline-model-parallel-size 2 --encoder-pipeline-model-parallel-size 1", world_size=3
    )
    transformer = config.transformer
    assert (transformer.pipeline_model_parallel_size, transformer.pipeline_model_parallel_split_rank) == (3, 1)


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("--num-layers 4 --decoder-num-layers 2", 1),
        ("--num-layers 4 --pipeline-model-parallel-size 2 --encoder-pipeline-model-parallel-size 1", 3),
    ],
)
def test_a_description_gives_the_run_again(flags: str, world_size: int) -> None:
    config = configured(flags, world_size)
    again = configured("", world_size, base=" ".join(command_line_of(config)))
    assert architecture_of(again) == architecture_of(config) and again.transformer == config.transformer


def test_a_checkpoint_of_another_bias_is_told() -> None:
    relative = "--num-layers 2 --position-embedding-type relative"
    described = {"architecture": architecture_of(configured(f"{relative} --encoder-num-layers 3"))}
    differing = architecture_differences(configured(f"{relative} --relative-attention-max-distance 64"), described)
    assert [line.split(" is ")[0] for line in differing] == [
        "--encoder-num-layers",
        "--relative-attention-max-distance",
    ]


def test_the_layout_auto_weighs_both_stacks() -> None:
    """The encoder's rows are twice as long, so its layers cost more than the decoder's."""
    config = configured("--num-layers 4 --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout auto", 3)
    resolved, notes = resolve_auto_layout(config, 640)
    assert resolved.transformer.pipeline_model_parallel_layout == notes[0].split()[-1]
    entries = rank_memory(resolved, PROVIDERS, NullTokenizer(600, None, None), 640)
    texts = [stages_text(entry.shard.stages) for entry in entries]
    assert texts[0].startswith("embedding, layer") and "of the encoder" in texts[0]
    assert texts[-1].endswith("of the decoder, head and loss")


@pytest.mark.parametrize(
    ("flags", "world_size", "problem"),
    [
        ("--context-parallel-size 2", 2, "--context-parallel-size 2: T5 does not split sequences"),
        ("--num-experts 4", 1, "--num-experts 4: T5's layers have no such part"),
        ("--qk-layernorm", 1, "--qk-layernorm: T5's layers have no such part"),
        ("--attention-output-gate", 1, "--attention-output-gate: T5's layers have no such part"),
        ("--norm-placement post", 1, "--norm-placement post: T5's layers have their norms before attention and MLP"),
        ("--norm-placement parallel_two_norms", 1, "--norm-placement parallel_two_norms: T5's layers have their"),
        ("--group-query-attention --num-query-groups 2", 1, "--group-query-attention"),
        ("--position-embedding-type none", 1, "--position-embedding-type none: T5 has"),
        ("--encoder-tensor-model-parallel-size 2", 1, "--encoder-tensor-model-parallel-size 2: the encoder has"),
        ("--encoder-pipeline-model-parallel-size -1", 1, "--encoder-pipeline-model-parallel-size -1 must be"),
        ("--max-position-embeddings 32 --decoder-seq-length 40", 1, "--decoder-seq-length 40 is longer than"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --decoder-seq-length 15",
            2,
            "--sequence-parallel: --decoder-seq-length 15 is not divisible by --tensor-model-parallel-size 2; use 14",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            2,
            "--num-virtual-stages-per-pipeline-rank 2: an encoder and a decoder have one stage on each rank",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-split-rank 2",
            2,
            "--pipeline-model-parallel-split-rank 2: the encoder and the decoder need a stage each",
        ),
    ],
)
def test_what_t5_refuses_before_a_process_group_starts(flags: str, world_size: int, problem: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        configured(f"--num-layers 4 {flags}", world_size)
    assert any(line.startswith(problem) for line in error.value.problems), error.value.problems


def test_flags_of_t5_in_other_runs() -> None:
    gpt = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 1 "
    gpt += "--train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 50"
    for flags, problem in (
        ("--position-embedding-type relative", "--position-embedding-type relative is for T5"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-split-rank 1", "is for T5"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            configure(
                f"{gpt} {flags}".split(),
                None,
                {"model_family": "gpt"},
                launch_environment=LaunchEnvironment(2 if "size 2" in flags else 1, False),
            )
    config = configure(gpt.split(), launch_environment=LaunchEnvironment(1, False))
    with pytest.raises(UserError, match="--decoder-seq-length is missing"):
        pretrain_t5.build_model(mock.Mock(config=config), mock.Mock())


COMMANDS = [row for row in megatron_lm_commands() if row["entry"] == "pretrain_t5.py"]


@pytest.mark.fast(
    "v0.16.1:examples/t5/train_t5_220m_distributed.sh",
    "v0.16.1:tests/functional_tests/test_cases/t5/t5_mcore_tp1_pp1_vp1_resume_torch",
    "main:tests/functional_tests/test_cases/t5/t5_mcore_tp1_pp1_vp1_resume_torch",
    "main:tests/functional_tests/test_cases/t5/t5_mcore_tp2_pp1_vp1",
    "main:tests/functional_tests/test_cases/t5/t5_mcore_tp4_pp1",
)
@pytest.mark.parametrize("command", COMMANDS, ids=[row["source"] for row in COMMANDS])
def test_megatron_lm_commands_build_their_model_on_every_rank(command: dict[str, Any]) -> None:
    words = shlex.split(command["command"])
    environment = LaunchEnvironment(smallest_world(words), True)
    config = configure(words, None, pretrain_t5.DEFAULTS, launch_environment=environment)
    # Kernels are the affair of a machine with GPUs; what ranks hold does not depend on them.
    config.transformer.attention_backend = AttnBackend.auto
    assert config.transformer.num_encoder_layers == config.transformer.num_layers == 12
    assert len(rank_memory(config, PROVIDERS, NullTokenizer(1000, None, None), 1024)) == config.world_size
