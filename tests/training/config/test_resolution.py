"""From a command line to the config objects: defaults, sources of values, and the frozen result."""

import shlex

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_lines import SMALL, configured

from megatron.core.initializers import XavierUniform
from megatron.core.ops.activation import gelu_tanh, quick_gelu, squared_relu
from megatron.core.transformer.mlp import activation_of
from megatron.training.arguments import configure
from megatron.training.config.flag_table import Flag, flag_table
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.resolution import ConfigurationError
from megatron.training.config.settings import LaunchEnvironment


def test_the_smallest_run() -> None:
    config = configured()
    assert config.training.global_batch_size == 2 and config.data.seq_length == 128
    assert config.model.max_position_embeddings == 128
    assert config.transformer.num_query_groups == 4 and config.transformer.ffn_hidden_size == 256
    assert config.schedule.lr_decay_iters == 10 and config.data.dataloader_type == "single"
    assert config.parallel.distributed_backend == "gloo" and config.grid.data == 1


def test_activations() -> None:
    def kind(flags: str) -> tuple[object, bool, bool]:
        config = configured(flags).transformer
        return config.activation_func, config.gated_linear_unit, config.bias_activation_fusion

    gelu = torch.nn.functional.gelu
    assert kind("") == (gelu, False, True)
    assert kind("--no-bias-gelu-fusion") == (gelu, False, False)
    assert kind("--disable-bias-linear") == (gelu, False, False)
    assert kind("--openai-gelu --disable-bias-linear")[0] is gelu_tanh
    assert kind("--swiglu")[:2] == (torch.nn.functional.silu, True)
    assert kind("--quick-geglu")[:2] == (quick_gelu, True)
    assert kind("--squared-relu")[:2] == (squared_relu, False)


def test_init_methods() -> None:
    transformer = configured("--init-method-xavier-uniform").transformer
    assert transformer.init_method == transformer.output_layer_init_method == XavierUniform()


def test_provenance() -> None:
    config = configure(
        SMALL.split(), args_defaults={"tensorboard_dir": "x"}, launch_environment=LaunchEnvironment(1, False)
    )
    where = config.provenance
    assert where["num_layers"] == "flag" and where["weight_decay"] == "default"
    assert where["ffn_hidden_size"] == "derived" and where["tensorboard_dir"] == "script"
    assert where["add_qkv_bias"] == "derived"  # by the library, when the config was made


def test_defaults_of_a_script_stand_only_where_there_is_no_value() -> None:
    config = configure(
        SMALL.split(),
        args_defaults={"tokenizer_type": "GPT2BPETokenizer", "tensorboard_dir": "x", "mine": 5},
        launch_environment=LaunchEnvironment(1, False),
    )
    assert config.tokenizer.tokenizer_type == "NullTokenizer" and config.logging.tensorboard_dir == "x"
    assert config.extra == {"mine": 5}
    assert any("GPT2BPETokenizer for tokenizer_type is not used: the value is NullTokenizer" in n for n in config.notes)


def test_nothing_can_be_changed_afterwards() -> None:
    config = configured()
    with pytest.raises(AttributeError):
        config.training.train_iters = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        config.training = None  # type: ignore[misc,assignment]


def test_every_value_of_the_flat_view_is_one_of_a_part() -> None:
    config = configured("--bf16")
    flat = config.flat()
    assert flat["num_layers"] == 2 and flat["params_dtype"] is torch.bfloat16 and flat["train_iters"] == 10
    assert set(flat_flags(config)) == set(flag_table()) - mla_only()


def flat_flags(config: PretrainConfig) -> list[str]:
    return [field for field in config.flat() if field in flag_table()]


def mla_only() -> set[str]:
    return {field for field, flag in flag_table().items() if flag.group == "multi-latent attention"}


@pytest.mark.parametrize("gate", ["--swiglu", "--geglu", "--quick-geglu"])
def test_every_gate_has_an_offset_and_a_clamp(gate: str) -> None:
    transformer = configured(f"{gate} --glu-linear-offset 1 --activation-func-clamp-value 7").transformer
    activation = activation_of(transformer)
    assert (activation.up_offset, activation.clamp) == (1.0, 7.0)


# ---------------------------------------------------------------------------------------------------------------------
# The result of any command line is a config or a list of problems

_LIKELY = (
    "0 1 2 3 4 7 8 64 128 -1 1e-3 0.5 1.0 nan inf abc 1e9 99999999999999999999 , 1,2 [1] ([0]*2) '' fp32 none auto "
    "local flash rope single cyclic WSD cosine constant full selective uniform block {} {x} %s"
)
_WORDS = st.sampled_from(_LIKELY.split())


@st.composite
def _some_flags(draw: st.DrawFn) -> list[str]:
    words = SMALL.split()
    for flag in draw(st.lists(st.sampled_from(list(flag_table().values())), max_size=8)):
        words.append(draw(st.sampled_from(flag.spellings)))
        words += _values_of(draw, flag)
    return words


def _values_of(draw: st.DrawFn, flag: Flag) -> list[str]:
    if flag.switch is not None:
        return []
    likely = st.sampled_from(flag.choices) if flag.choices else _WORDS
    count = flag.nargs if isinstance(flag.nargs, int) else 1
    return draw(st.lists(st.one_of(likely, _WORDS), min_size=count, max_size=count))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(words=_some_flags(), ranks=st.sampled_from([1, 2, 3, 8]))
def test_any_flags_give_a_config_or_problems(words: list[str], ranks: int) -> None:
    try:
        config = configure(words, launch_environment=LaunchEnvironment(ranks, False))
    except ConfigurationError as error:
        assert error.problems and all(problem and "\n" not in problem for problem in error.problems), shlex.join(words)
    else:
        assert config.transformer.num_layers >= 1 and config.training.global_batch_size >= 1
        assert config.grid.world_size == ranks


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.text(max_size=12), max_size=6))
def test_any_words_give_a_config_or_problems(words: list[str]) -> None:
    if any(word == "-h" or word.startswith("--help") for word in words):
        return
    with pytest.raises(ConfigurationError):
        configure(words, launch_environment=LaunchEnvironment(1, False))
