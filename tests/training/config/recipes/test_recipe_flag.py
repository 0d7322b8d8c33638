"""--recipe: below a config file and the command line, beside data, batch and layout."""

from pathlib import Path

import pytest
from support.command_lines import configured, problems_of

from megatron.training.arguments import configure
from megatron.training.config.command_line import read_command_line
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.inspection.print_config import config_lines
from megatron.training.inspection.run_description import command_line_of

RUN = "--recipe llama3-8b --micro-batch-size 1 --train-iters 10 --mock-data"


def test_it_sets_model_optimizer_and_schedule() -> None:
    config = configured("", base=RUN)
    assert (config.transformer.num_layers, config.transformer.hidden_size) == (32, 4096)
    assert (config.transformer.num_query_groups, config.model.rotary_base) == (8, 500000)
    assert config.optimizer.lr == 3e-4 and config.schedule.lr_decay_style == "cosine"
    assert config.data.seq_length == 8192 and config.tokenizer.vocab_size == 128255
    assert config.provenance["num_layers"] == "recipe" and config.provenance["train_iters"] == "flag"
    assert not [note for note in config.notes if "no effect" in note]


def test_flags_win_and_then_are_flags() -> None:
    config = configured("--num-layers 2 --lr 1e-3", base=RUN)
    assert config.transformer.num_layers == 2 and config.optimizer.lr == 1e-3
    assert config.provenance["num_layers"] == config.provenance["lr"] == "flag"
    listed = next(note for note in config.notes if note.startswith("--recipe llama3-8b: --"))
    assert "--num-layers" not in listed and "--hidden-size 4096" in listed


def test_a_flag_that_says_the_same_in_another_way_wins_too() -> None:
    config = configured("--lr-warmup-iters 3 --squared-relu", base=RUN)
    assert config.schedule.lr_warmup_iters == 3 and config.schedule.lr_warmup_fraction is None
    assert not config.transformer.gated_linear_unit


def test_a_config_file_wins_over_it_and_may_name_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_layers: 3\nrecipe: qwen3-8b\nmicro_batch_size: 1\ntrain_iters: 5\nmock_data: true\n")
    config = configured(f"--config {file}", base="")
    assert (config.transformer.num_layers, config.transformer.hidden_size) == (3, 4096)
    assert config.transformer.qk_layernorm and config.provenance["num_layers"] == "flag"
    other = configured(f"--config {file} --recipe llama2-7b", base="")  # the command line wins over the file
    assert not other.transformer.qk_layernorm and other.transformer.ffn_hidden_size == 11008


def test_print_config_says_recipe_and_reads_back_the_same_run(tmp_path: Path) -> None:
    config = configured("", base=RUN)
    lines = list(config_lines(config))
    assert any(line.startswith("num_layers: ") and line.endswith("# recipe") for line in lines)
    file = tmp_path / "printed.yaml"
    file.write_text("\n".join(lines))
    again = configured(f"--config {file}", base="")
    assert again.transformer == config.transformer and again.optimizer == config.optimizer
    assert again.schedule == config.schedule and again.tokenizer == config.tokenizer


def test_a_checkpoint_records_its_flags_not_its_name() -> None:
    words = command_line_of(configured("", base=RUN))
    assert "--recipe" not in words and words[words.index("--num-layers") + 1] == "32"


def test_without_a_tokenizer_only_runs_without_data_take_ids() -> None:
    run = "--recipe llama3-8b --micro-batch-size 1 --train-iters 10"
    assert configured("--dry-run", base=run).tokenizer.vocab_size == 128255
    assert any("GPT2BPETokenizer needs both" in problem for problem in problems_of("--data-path x", base=run))
    own = configured("--tokenizer-type NullTokenizer --vocab-size 99", base=RUN)
    assert own.tokenizer.vocab_size == 99


def test_an_unknown_name_is_the_only_mistake() -> None:
    assert problems_of(RUN.replace("llama3-8b", "llama3-8"), base="") == [
        "--recipe llama3-8: no such recipe; did you mean llama3-8b? python tools/recipes.py list lists all"
    ]


def test_another_script_trains_it() -> None:
    with pytest.raises(ConfigurationError, match=r"--recipe bert-base is a BERT: pretrain_bert\.py trains it"):
        words = f"{RUN} --tokenizer-type NullTokenizer --vocab-size 9".replace("llama3-8b", "bert-base").split()
        configure(words, None, {"model_family": "gpt"}, launch_environment=LaunchEnvironment(1, False))


def test_gathering_flags_do_not_continue_a_recipe() -> None:
    line = read_command_line(["--recipe", "llama3-8b", "--num-layers", "4", "--num-layers", "5"])
    assert line.values["num_layers"] == 5 and "num_layers" not in line.from_recipe
