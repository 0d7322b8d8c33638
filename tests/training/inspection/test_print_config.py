"""--print-config shows every value and where it comes from."""

from support.command_lines import configured

from megatron.training.config.flag_table import flag_table
from megatron.training.inspection.print_config import config_lines


def test_every_flag_and_every_derived_value_has_a_line() -> None:
    config = configured("--bf16 --swiglu --save x")
    words = [line.removeprefix("# ").replace("# ", "").split() for line in config_lines(config)]
    rows = {row[0].removesuffix(":"): row for row in words if len(row) > 1 and row[0].endswith(":")}
    assert rows["num_layers"][1:] == ["2", "flag"]
    assert rows["weight_decay"][1:] == ["0.01", "default"]
    assert rows["ffn_hidden_size"][1:] == ["128", "derived"]
    assert rows["exp_avg_dtype"][1:] == ["fp32", "default"]  # the word that the flag takes
    assert rows["metrics_path"][1:] == ["x/metrics.jsonl", "derived"]
    assert rows["params_dtype"][1:] == ["bfloat16", "derived"] and rows["activation_func"][1:] == ["silu", "derived"]
    offered = {field for field, flag in flag_table().items() if flag.group != "multi-latent attention"}
    assert offered <= rows.keys()
    assert {row[-1] for row in rows.values() if len(row) > 2} <= {"default", "flag", "derived", "script"}
