"""--config: flags from a file; --print-config writes one."""

import json
from pathlib import Path

import pytest
from support.command_lines import configured, problems_of

from megatron.core.exceptions import UserError
from megatron.training.config.command_line import read_command_line
from megatron.training.config.config_file import read_config_file
from megatron.training.inspection.print_config import config_lines

CONFIG = """
model:
  num_layers: 4
  hidden-size: 32       # a flag's name
  group_query_attention: false
  moe-layer-freq: "[0,1]*2"
num_attention_heads: 4
bf16: true
gradient_accumulation_fusion: false
lr: 1e-3
data_path: [1, a, 2, b]
ffn_hidden_size: null
model_parallel_size: 2
"""


def values_of(path: Path, *flags: str) -> dict[str, object]:
    line = read_command_line(["--config", str(path), *flags])
    assert not line.problems
    return {field: line.values[field] for field in line.given} | {"warnings": line.warnings}


def test_a_file_gives_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    values = values_of(path, "--num-layers", "6", "--data-path", "c")
    assert (values["num_layers"], values["hidden_size"], values["num_attention_heads"]) == (6, 32, 4)
    assert values["lr"] == 1e-3 and values["bf16"] is True and values["data_path"] == ["c"]
    assert values["gradient_accumulation_fusion"] is False and values["moe_layer_freq"] == [0, 1, 0, 1]
    assert not {"group_query_attention", "ffn_hidden_size"} & values.keys()
    assert values["tensor_model_parallel_size"] == 2
    assert values["warnings"] == [
        f"{path}:13: --model-parallel-size 2: retired; read as --tensor-model-parallel-size 2"
    ]
    later = tmp_path / "later.json"
    later.write_text(json.dumps({"num_layers": 8, "profile_ranks": [1, 2], "no-load-optim": True}))
    line = read_command_line(["--config", str(path), str(later)])
    assert line.values["num_layers"] == 8 and line.values["hidden_size"] == 32 and line.values["no_load_optim"] is True
    assert line.values["profile_ranks"] == [1, 2]
    assert read_command_line(["--yaml-cfg", str(later)]).values["num_layers"] == 8


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("num_layers: 2\nhiden_size: 3", ":2: --hiden-size: unknown flag; did you mean --hidden-size, --ffn"),
        ("\nnum_layers: many", ":2: --num-layers many: expected a whole number"),
        ("num_layers: 2\nlr: 1\nnum-layers: 3", ":3: num-layers has another value in line 1; give one"),
        ("model:\n  lr: 2\nlr: 1", ":3: lr has another value in line 2; give one"),
        ("bf16: 1", ":1: bf16: expected true or false"),
        ("num_layers: {a: 1}", ":1: num_layers: expected a value, not further keys"),
        ("data_path: [[a]]", ":1: data_path: expected a list of values without further lists"),
        ("num_layers: [1, 2]", ":1: --num-layers 1 2: takes one value; 2 belongs to no flag"),
        ('{"normalization": "Norm"}', ":1: --normalization Norm: choose from LayerNorm, RMSNorm"),
        ("config: x", ":1: a config file cannot name another"),
        ("num_layers: 1\nlr: [1", ":2: neither YAML nor JSON: expected ',' or ']', but got '<stream end>'"),
        ("- a", ": expected keys and values, such as num_layers: 12"),
        ("rl_profile: true", ":1: --rl-profile: reinforcement learning is out of scope"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    problems = problems_of(f"--config {path}")
    (problem,) = problems
    assert problem.removeprefix("--config ").startswith(f"{path}{says}")


def test_a_file_that_nests_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text(f"a: {'[' * 3000}{']' * 3000}")
    with pytest.raises(UserError, match=r"--config .*deep\.yaml: values are nested too deeply"):
        read_config_file(str(tmp_path / "deep.yaml"))


def test_a_file_that_is_not_there() -> None:
    assert problems_of("--config no.yaml") == ["--config no.yaml: No such file or directory"]
    assert problems_of("--yaml-cfg no.yaml") == ["--yaml-cfg no.yaml: No such file or directory"]


def test_the_output_of_print_config_gives_the_same_run(tmp_path: Path) -> None:
    flags = (
        "--print-config --bf16 --swiglu --no-load-rng --window-size 7,0 --num-experts 4 --moe-layer-freq [0,1] "
        "--no-gradient-accumulation-fusion --split 9,1,0 --exit-signal SIGUSR1 --attention-backend unfused "
        "--profile-ranks 0 3 --save a:b --rope-scaling-factor 2"
    )
    config = configured(flags)
    path = tmp_path / "log.txt"
    path.write_text("a note: of the run\n" + "\n".join(config_lines(config)) + "\nmemory 3: GiB\n")
    again = configured(base=f"--config {path}")
    ours, theirs = config.flat(), again.flat()
    assert theirs.pop("config_file") == [str(path)] and ours.pop("config_file") is None
    assert ours.pop("print_config") and not theirs.pop("print_config")
    assert ours == theirs
