"""get_args() for user scripts: a live view that reads everything and cannot change used settings."""

import ast
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command_lines import SMALL
from support.runs import GPT, TINY

from megatron.core.exceptions import UserError
from megatron.core.timers import Timers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.facades import global_vars, parallel_state
from megatron.facades.global_vars import PublishedRun, published
from megatron.facades.num_microbatches_calculator import get_current_global_batch_size
from megatron.facades.pretrain import pretrain_config
from megatron.training.arguments import configure, core_transformer_config_from_args, parse_args, validate_args
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.launch.environment import Publication
from megatron.training.loop import run_pretraining


@dataclass
class State:
    iteration: int = 0
    consumed_train_samples: int = 0
    floating_point_operations_so_far: float = 1.5


@pytest.fixture
def run() -> Iterator[Any]:
    def provider(parser: Any) -> Any:
        parser.add_argument("--mine", type=int, default=1)
        return parser

    config = configure([*SMALL.split(), "--mine", "7"], provider, launch_environment=LaunchEnvironment(1, False))
    context = SimpleNamespace(
        config=config, state=State(), tokenizer="the tokenizer", environment=None, timers=Timers(0, "max")
    )
    global_vars.set_current_run(context, padded_vocab_size=128)  # type: ignore[arg-type]
    yield context
    global_vars.clear_current_run()


def test_before_a_run_the_way_is_named() -> None:
    global_vars.clear_current_run()  # other tests of this process may have trained
    with pytest.raises(UserError, match="once the run is set up"):
        global_vars.get_args()
    with pytest.raises(UserError, match="once the run is set up"):
        global_vars.get_tokenizer()
    with pytest.raises(UserError, match="with the flag --exit-signal-handler"):
        global_vars.get_signal_handler()


def test_settings_by_field_and_by_flag(run: Any) -> None:
    args = global_vars.get_args()
    assert args.hidden_size == 64 and args.global_batch_size == 2 and args.train_iters == 10
    assert args.num_experts is None and args.norm_epsilon == 1e-5 and args.mine == 7
    assert args.padded_vocab_size == 128 and args.world_size == 1 and args.rank == 0
    assert args.data_parallel_size == 1 and args.params_dtype is run.config.transformer.params_dtype
    assert global_vars.get_tokenizer() == "the tokenizer"


def test_state_is_seen_as_it_is_now(run: Any) -> None:
    args = global_vars.get_args()
    assert args.iteration == 0
    run.state.iteration, run.state.consumed_train_samples = 5, 10
    assert args.iteration == args.curr_iteration == 5 and args.consumed_train_samples == 10
    assert args.num_floating_point_operations_so_far == 1.5


def test_a_script_may_write_what_is_its_own(run: Any) -> None:
    args = global_vars.get_args()
    args.brand_new = 3
    args.mine = 8
    assert args.brand_new == 3 and args.mine == 8 and vars(args)["brand_new"] == 3
    del args.brand_new
    assert not hasattr(args, "brand_new") and getattr(args, "brand_new", "default") == "default"


def test_a_setting_that_was_used_cannot_be_written(run: Any) -> None:
    args = global_vars.get_args()
    args.lr = 1e-3  # as it is
    with pytest.raises(UserError, match=r"args.lr = 0.5: its value 0.001 was used already; pass --lr, or give"):
        args.lr = 0.5
    with pytest.raises(UserError, match="pass --num-experts"):
        args.num_experts = 8
    with pytest.raises(UserError, match=r"pretrain\(\), train\(\) and train_step\(\) count"):
        args.iteration = 4
    with pytest.raises(UserError, match="change the flags that it follows from"):
        args.world_size = 2
    with pytest.raises(UserError, match="cannot be deleted"):
        del args.lr
    assert args.lr == 1e-3


def test_vars_holds_everything(run: Any) -> None:
    values = vars(global_vars.get_args())
    assert values["hidden_size"] == 64 and values["iteration"] == 0 and values["mine"] == 7
    assert "hidden_size" in dir(global_vars.get_args())


def test_a_transformer_config_comes_out_of_it(run: Any) -> None:
    built = core_transformer_config_from_args(global_vars.get_args())
    assert type(built) is TransformerConfig and built == run.config.transformer


def test_timers_and_writers(run: Any) -> None:
    assert global_vars.get_timers() is global_vars.get_timers()
    assert global_vars.get_tensorboard_writer() is None and global_vars.get_wandb_writer() is None


def test_flags_of_other_releases_have_their_defaults(run: Any) -> None:
    args = global_vars.get_args()
    assert args.s3_cache_path is None and args.renormalize_blend_weights is False
    assert args.encoder_pipeline_model_parallel_size == 0 and args.memory_snapshot_path == "snapshot.pickle"


def test_a_script_sets_arguments_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = SimpleNamespace(lr=1.0)
    global_vars.set_args(mine)
    assert global_vars.get_args() is mine
    monkeypatch.setattr("sys.argv", ["script.py", *SMALL.split()])
    args = validate_args(parse_args())
    global_vars.set_global_variables(args)
    assert global_vars.get_args() is args and global_vars.get_tokenizer().vocab_size == args.vocab_size + 1
    assert get_current_global_batch_size() == args.global_batch_size
    global_vars.destroy_global_vars()
    with pytest.raises(UserError, match="once the run is set up"):
        global_vars.get_tokenizer()
    with pytest.raises(UserError, match="result of validate_args"):
        global_vars.set_global_variables(parse_args())
    global_vars.unset_global_variables()


def test_our_own_code_never_asks_here() -> None:
    root = Path(__file__).parents[2] / "megatron"
    names = {"get_args", "get_tokenizer", "get_timers"}
    asking = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        if not any(name in text for name in names):
            continue
        called = {
            node.func.id
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        asking += [path] if called & names else []
    assert asking == []


def test_providers_are_published_once_they_are_asked_to_be() -> None:
    assert type(GPT.publication) is Publication and isinstance(published(GPT).publication, PublishedRun)


def test_a_run_that_publishes_nothing_leaves_the_functions_of_scripts_alone() -> None:
    global_vars.clear_current_run()
    config = configure(f"{TINY} --mock-data --eval-iters 0 --train-iters 1".split())
    run_pretraining(config, GPT, time.monotonic())
    with pytest.raises(UserError, match="works once the run is set up"):
        global_vars.get_args()
    pretrain_config(config, GPT, time.monotonic())
    assert global_vars.get_args().train_iters == 1


def test_virtual_stages_are_those_of_the_run_inside_it() -> None:
    run = PublishedRun()
    with run.stages(SimpleNamespace(chunks=3, v_shaped=False)):
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 3
        with run.stages(SimpleNamespace(chunks=2, v_shaped=True)):
            assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 2
            assert parallel_state.is_pipeline_v_shaped()
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 3
    assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
