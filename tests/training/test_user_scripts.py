"""Scripts of users, written as Megatron-LM's are: providers, forward steps, loops of their own."""

import os
import signal
import sys
from argparse import ArgumentParser
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from support.launch import launch
from support.runs import TINY, Outcome, differences, run_script, train
from torch import Tensor, nn

from megatron.core import mpu
from megatron.core.declarations.enums import ModelType
from megatron.core.exceptions import UserError
from megatron.core.health.rerun_state_machine import get_rerun_state_machine
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.data.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.data.datasets.utils import get_blend_from_list
from megatron.facades.checkpointing import checkpoint_exists
from megatron.facades.num_microbatches_calculator import get_num_microbatches
from megatron.facades.training import build_train_valid_test_data_iterators, evaluate, setup_model_and_optimizer
from megatron.facades.utils import (
    average_losses_across_data_parallel_group,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    unwrap_model,
)
from megatron.training import (
    get_args,
    get_tensorboard_writer,
    get_timers,
    get_tokenizer,
    global_vars,
    initialize_megatron,
    pretrain,
    print_rank_0,
    save_checkpoint,
    train_step,
    training,
)
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.datasets.data_samplers import build_pretraining_data_loader  # type: ignore[import-not-found]
from megatron.training.launch.signals import DEFAULT_SIGNALS

EXACT = "--make-vocab-size-divisible-by 1"
"""A script of Megatron-LM's kind gives its model the padded vocabulary as the true one."""

# ---------------------------------------------------------------------------------------------------------------------
# A script like Megatron-LM's


def gpt_model(pre_process: bool, post_process: bool, **more: Any) -> GPTModel:
    args = get_args()
    return GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(args.num_experts, False, args.qk_layernorm),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        **more,
    )


def model_provider(pre_process: bool = True, post_process: bool = True) -> GPTModel:
    print_rank_0("building GPT model ...")
    return gpt_model(pre_process, post_process)


def get_batch(data_iterator: Any) -> tuple[Any, ...]:
    if not mpu.is_pipeline_first_stage() and not mpu.is_pipeline_last_stage():
        return None, None, None, None, None
    return tuple(get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator)).values())


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    losses = output_tensor.view(-1).float()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * mask) / mask.sum()
    return loss, {"lm loss": average_losses_across_data_parallel_group([loss])[0]}


def three_values(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total = torch.sum(output_tensor.view(-1) * loss_mask.view(-1))
    count = loss_mask.sum().to(torch.int)
    report = torch.cat([total.clone().detach().view(1), count.view(1)])
    return total, count, {"lm loss": report}


def forward_step(data_iterator: Any, model: nn.Module, loss: Any = three_values) -> tuple[Tensor, Any]:
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator)
    timers("batch-generator").stop()
    return model(tokens, position_ids, attention_mask, labels=labels), partial(loss, loss_mask)


def datasets_of(counts: list[int], builds: Any) -> tuple[Any, Any, Any]:
    """Returns the data sets that the flags describe, on ranks that build them."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.reset_attention_mask,
    )
    return tuple(BlendedMegatronDatasetBuilder(GPTDataset, counts, builds, config).build())


def datasets_provider(train_val_test_num_samples: list[int]) -> tuple[Any, Any, Any]:
    return datasets_of(train_val_test_num_samples, lambda: mpu.get_tensor_model_parallel_rank() == 0)


datasets_provider.is_distributed = True  # type: ignore[attr-defined]
SCRIPT = (datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)


def losses_of(outcome: Outcome) -> list[float]:
    return outcome.losses + [record.losses["lm loss"] for record in outcome.validations]


@pytest.mark.slow_cases("")
@pytest.mark.parametrize("masks", ["", "--reset-position-ids --reset-attention-mask --eod-mask-loss"])
def test_a_megatron_lm_script_trains_as_ours(corpus, masks):
    flags = f"--fp64 --data-path {corpus} --train-iters 4 --eval-interval 2 --eval-iters 1 {EXACT} {masks}"
    ours, theirs = train(flags), run_script(flags, *SCRIPT)
    assert losses_of(theirs) == pytest.approx(losses_of(ours), abs=1e-11) and len(theirs.losses) == 4
    assert theirs.at_end["state"] == ours.at_end["state"]


def test_a_loss_of_two_values(corpus):
    flags = f"--fp64 --data-path {corpus} --train-iters 3 --eval-iters 1 {EXACT}"
    step = partial(forward_step, loss=loss_func)
    theirs = run_script(flags, datasets_provider, model_provider, ModelType.encoder_or_decoder, step)
    assert losses_of(theirs) == pytest.approx(losses_of(train(flags)), abs=1e-6)  # it sums in float32
    with pytest.raises(SystemExit, match="2"):
        run_script(f"{flags} --calculate-per-token-loss", *SCRIPT[:3], step)


def validated(seen: list[float], fault: int | None, loss_mask: Tensor, output_tensor: Tensor) -> tuple[Any, ...]:
    """`three_values` whose call number `fault` is wrong, as by a fault of the hardware."""
    total, count, report = three_values(loss_mask, output_tensor)
    seen.append(total.item())
    if len(seen) == fault:
        total = total * torch.nan
    get_rerun_state_machine().validate_result(total, torch.isnan, "found NaN")
    return total, count, report


@pytest.mark.parametrize("mode", ["validate_results", "report_stats"])
def test_a_step_with_a_transient_fault_is_computed_again(corpus, mode, capsys):
    flags = f"--data-path {corpus} --train-iters 3 --eval-iters 0 {EXACT} --rerun-mode {mode} --log-straggler"

    def run(fault: int | None) -> tuple[Outcome, list[float]]:
        seen: list[float] = []
        step = partial(forward_step, loss=partial(validated, seen, fault))
        outcome = run_script(flags, datasets_provider, model_provider, ModelType.encoder_or_decoder, step)
        return outcome, seen

    whole, calls = run(None)
    good = three = 3 * 4
    assert len(calls) == (good if mode == "validate_results" else 2 * three)
    printed = capsys.readouterr().out
    if mode == "report_stats":
        assert "'found NaN': 0 of 12 results changed" in printed
        return
    again, calls = run(6)
    assert len(calls) == 4 * 4 and calls[4:8] == calls[8:12]
    assert differences(again.at_end, whole.at_end) == []
    assert "a transient fault of this device" in capsys.readouterr().out


def test_own_arguments_and_defaults(corpus, capsys):
    seen: dict[str, Any] = {}

    def extra(parser: ArgumentParser) -> ArgumentParser:
        group = parser.add_argument_group(title="mine")
        group.add_argument("--my-factor", type=float, default=1.0)
        return parser

    def step(data_iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
        args = get_args()
        seen.update(factor=args.my_factor, iteration=args.curr_iteration, microbatches=get_num_microbatches())
        return forward_step(data_iterator, model)

    base = TINY.replace("--tokenizer-type NullTokenizer", "")
    run_script(
        f"--data-path {corpus} --train-iters 2 --eval-iters 0 --my-factor 2.5",
        *SCRIPT[:3],
        step,
        base=base,
        extra_args_provider=extra,
        args_defaults={"tokenizer_type": "NullTokenizer", "seq_length": 999},
    )
    assert seen == {"factor": 2.5, "iteration": 1, "microbatches": 4}
    out = capsys.readouterr().out
    assert "building GPT model ..." in out
    assert "the script's default 999 for seq_length is not used: the value is 16" in out


def test_what_is_not_called_is_refused():
    with pytest.raises(UserError, match="inprocess_call_wrapper"):
        run_script("", *SCRIPT, inprocess_call_wrapper=print)


def sums_or_losses(loss_mask: Tensor, output: Tensor, non_loss_data: bool = False) -> Any:
    """Returns what a script's loss function returns; as data that are no losses, the sums of a micro-batch."""
    if non_loss_data:
        return (output * loss_mask).sum().item(), loss_mask.sum().item()
    writer = get_tensorboard_writer()
    if writer is not None:
        writer.add_scalar("mine", 5.0, get_args().iteration)
    return three_values(loss_mask, output)


@pytest.mark.slow
def test_data_of_evaluations_that_are_no_losses(corpus, tmp_path, capsys):
    """They come from the micro-batches of the evaluation's last global batch, and take no sample from the next one."""
    pytest.importorskip("tensorboard")
    flags = f"--fp64 --data-path {corpus} --train-iters 4 --eval-interval 2 --eval-iters 2 {EXACT}"
    seen: list[tuple[Any, int]] = []

    def process(data: Any, iteration: int, writer: Any) -> None:
        assert writer is get_tensorboard_writer() is not None
        writer.add_scalar("sequences", len(data), iteration)
        seen.append((data, iteration))

    step = partial(forward_step, loss=sums_or_losses)
    board = f"{flags} --tensorboard-dir {tmp_path}"
    theirs = run_script(board, *SCRIPT[:3], step, process_non_loss_data_func=process)
    assert losses_of(theirs) == pytest.approx(losses_of(run_script(flags, *SCRIPT)), abs=1e-11)
    assert [iteration for _, iteration in seen] == [2, 4, 4]  # the last two: validation and test
    assert all(len(data) == 4 for data, _ in seen)
    one = run_script(f"{flags.replace('--eval-iters 2', '--eval-iters 1')}", *SCRIPT)
    total, count = (sum(column) for column in zip(*seen[0][0], strict=True))
    both, first = theirs.validations[0], one.validations[0]
    assert both.tokens is not None and first.tokens is not None
    of_second = both.losses["lm loss"] * both.tokens - first.losses["lm loss"] * first.tokens
    assert total == pytest.approx(of_second) and count == both.tokens - first.tokens
    seen.clear()
    other = f"{board}/other"  # a run that begins again moves the old points out of its folder
    run_script(other, *SCRIPT, non_loss_data_func=lambda model: [model[0].training], process_non_loss_data_func=process)
    assert seen[0] == ([False], 2)
    seen.clear()
    capsys.readouterr()
    run_script(flags, *SCRIPT, process_non_loss_data_func=process)
    assert not seen and "process_non_loss_data_func is not called: it takes the writer" in capsys.readouterr().out
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Scalars("mine")[0].value == 5.0 and events.Scalars("sequences")[0].value == 4


def test_an_optimizer_of_torch(corpus, tmp_path):
    """torch.optim.SGD as a script gives it equals --optimizer sgd, also across a restart."""

    def provider(model: list[nn.Module]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for chunk in model for p in chunk.parameters()], lr=0.1, momentum=0.9)

    flags = f"--fp64 --data-path {corpus} --train-iters 6 --eval-iters 0 --weight-decay 0 --lr 0.1 {EXACT}"
    ours = train(f"{flags} --optimizer sgd --sgd-momentum 0.9")
    theirs = run_script(flags, *SCRIPT, optimizer_provider=provider)
    assert theirs.losses == pytest.approx(ours.losses, abs=1e-10)
    folders = f"{flags} --save {tmp_path} --load {tmp_path}"
    first = run_script(f"{folders} --exit-interval 3", *SCRIPT, optimizer_provider=provider)
    second = run_script(folders, *SCRIPT, optimizer_provider=provider)
    assert first.losses + second.losses == theirs.losses
    assert differences(second.at_end, theirs.at_end) == []


def test_two_ranks(corpus, tmp_path):
    flags = f"--fp64 --data-path {corpus} --train-iters 3 --eval-iters 1 {EXACT} --log-interval 1"
    program = launch(flags, 2, tmp_path, pretrain_script)
    assert program.exit_codes() == [0, 0], program.output(0) + program.output(1)
    alone = train(flags)
    assert program.output(0).count("building GPT model") == 1 and "building" not in program.output(1)
    for loss in alone.losses:
        assert f"lm loss: {loss:.6E}" in program.output(1)


def pretrain_script() -> None:
    pretrain(*SCRIPT)


# ---------------------------------------------------------------------------------------------------------------------
# A model and data of the user's own


class Points:
    """y = 3 x0 - 2 x1 + 1, as items of dictionaries."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(2, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": 3 * x[:1] - 2 * x[1:] + 1}


class Line(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(1, 2))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def points_step(data_iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
    batch = next(data_iterator)
    return (model(batch["x"]) - batch["y"]).square().mean(), lambda loss: (loss, {"square": loss.detach()})


def test_a_model_and_data_of_ones_own():
    outcome = run_script(
        "--mock-data --train-iters 60 --eval-iters 1 --lr 0.2 --lr-decay-style constant --weight-decay 0",
        lambda counts: [Points(count) for count in counts],
        lambda config: Line(config),
        ModelType.encoder_or_decoder,
        points_step,
    )
    losses = [step.losses["square"] for step in outcome.steps]
    assert losses[0] > 3 and losses[-1] < 0.05
    assert outcome.weights["weight weight"].tolist() == pytest.approx([3, -2], abs=0.2)
    assert outcome.validations[0].losses["square"] < 0.1


# ---------------------------------------------------------------------------------------------------------------------
# A loop of the user's own


def test_a_loop_of_ones_own(corpus, tmp_path, monkeypatch, capsys):
    """Megatron-LM's functions, one by one, give the losses that pretrain gives."""
    flags = f"--fp64 --data-path {corpus} --train-iters 3 --eval-interval 3 --eval-iters 2 {EXACT} --save {tmp_path}"
    expected = train(flags.replace(str(tmp_path), str(tmp_path / "other")))
    monkeypatch.setattr("sys.argv", ["script.py", *f"{TINY} {flags}".split()])
    handlers = [signal.getsignal(number) for number in DEFAULT_SIGNALS]
    initialize_megatron(args_defaults={"tokenizer_type": "NullTokenizer"})
    assert [signal.getsignal(number) for number in DEFAULT_SIGNALS] == handlers  # a script handles signals itself
    args = get_args()
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, ModelType(1))
    assert isinstance(unwrap_model(model)[0], GPTModel)
    data, valid, _ = build_train_valid_test_data_iterators(datasets_provider)
    losses, config, schedule = [], model[0].config, get_forward_backward_func()
    while args.iteration < args.train_iters:
        loss, skipped, save, leave, code, norm, _, _ = train_step(
            forward_step, data, model, optimizer, scheduler, config, schedule
        )
        losses.append(float(loss["lm loss"]))
        assert (skipped, save, leave, code) == (0, False, False, 0)
        assert norm == pytest.approx(expected.steps[len(losses) - 1].grad_norm)
    assert losses == pytest.approx(expected.losses, abs=1e-11)
    found, _, out_of_time = evaluate(forward_step, valid, model, None, config)
    assert float(found["lm loss"]) == pytest.approx(expected.validations[0].losses["lm loss"]) and not out_of_time
    assert not checkpoint_exists(None) and not checkpoint_exists(tmp_path)
    save_checkpoint(args.iteration, model, optimizer, scheduler, 0.0)
    assert checkpoint_exists(tmp_path)
    assert training.num_floating_point_operations(args, 2) == 2 * training.num_floating_point_operations(args, 1) > 0
    training.print_datetime("after training")
    training.evaluate_and_print_results("the end", forward_step, valid, model, args.iteration, None, None)
    printed = capsys.readouterr().out
    assert "[after training] datetime: " in printed and " validation loss at the end | lm loss value: " in printed
    counts = training.get_train_valid_test_num_samples()
    datasets = training.build_train_valid_test_datasets(datasets_provider)
    assert (
        len(datasets[0]) >= counts[0]
        and len(training.build_train_valid_test_datasets(datasets_provider, (1, 1, 1))) == 3
    )
    loader = build_pretraining_data_loader(datasets[0], args.consumed_train_samples)
    assert loader is not None and build_pretraining_data_loader(None, 0) is None
    batches = training.cyclic_iter(loader)
    assert torch.equal(next(batches)["tokens"][0], datasets[0][args.consumed_train_samples]["tokens"])
    assert training.get_optimizer_param_scheduler(optimizer).state_dict()["max_lr"] == args.lr
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
    monkeypatch.setattr("sys.argv", ["script.py", *f"{TINY} {flags} --load {tmp_path} --min-lr 1e-4".split()])
    initialize_megatron()
    with pytest.raises(UserError, match=r"--min-lr is 0\.0001 in this run and 0\.0 in the checkpoint"):
        setup_model_and_optimizer(mock.Mock(side_effect=AssertionError("built")), ModelType(1))
    global_vars.clear_current_run()


@pytest.mark.slow
def test_megatron_lms_train_is_our_loop(corpus, tmp_path, monkeypatch, capsys):
    """With the iterators of the library and with a script's own."""
    flags = f"--fp64 --data-path {corpus} --train-iters 4 --eval-interval 2 --eval-iters 1 {EXACT} --log-interval 1"
    expected = train(flags)
    capsys.readouterr()
    for own in (False, True):
        folder = tmp_path / str(own)
        words = f"{TINY} {flags} --save {folder} --save-interval 3"
        monkeypatch.setattr("sys.argv", ["script.py", *words.split()])
        initialize_megatron()
        model, optimizer, scheduler = setup_model_and_optimizer(model_provider, ModelType(1))
        data, valid, _ = build_train_valid_test_data_iterators(datasets_provider)
        iterators = (iter(list(data)), valid) if own else (data, valid)
        called: list[Any] = []
        done, flops = training.train(
            forward_step,
            model,
            optimizer,
            scheduler,
            *iterators,
            None,
            model[0].config,
            non_loss_data_func=called.append,
        )
        assert done == 4 == get_args().iteration and flops > 0 and len(called) == 2
        out = capsys.readouterr().out
        assert all(f"lm loss: {loss:.6E}" in out for loss in expected.losses)
        assert out.count("validation loss at iteration") == 2
        assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
        next(valid)  # the data is still open
        global_vars.clear_current_run()


def test_a_signal_during_the_set_up_ends_megatron_lms_train(corpus, tmp_path, monkeypatch, capsys):
    words = f"{TINY} --data-path {corpus} --train-iters 4 --eval-iters 0 --exit-signal-handler --save {tmp_path}"
    monkeypatch.setattr("sys.argv", ["script.py", *words.split()])
    initialize_megatron()
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, ModelType(1))
    os.kill(os.getpid(), signal.SIGTERM)
    data, _, _ = build_train_valid_test_data_iterators(datasets_provider)
    with pytest.raises(SystemExit):
        training.train(forward_step, model, optimizer, scheduler, data, None, None, model[0].config)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert "exiting program after receiving SIGTERM" in capsys.readouterr().out
    global_vars.get_signal_handler().release()
    global_vars.clear_current_run()


def loop_with_a_bad_loss(flags: str, bad_step: int) -> tuple[list[tuple[Any, ...]], list[Tensor]]:
    """What `train_step` returns in steps of which one has a loss of NaN, and the weights after each step."""

    def step(data_iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
        losses, function = forward_step(data_iterator, model)
        if get_args().iteration != bad_step:
            return losses, function

        def reports_nan(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total, count, report = function(output)
            return total, count, {name: value * torch.nan for name, value in report.items()}

        return losses, reports_nan

    with mock.patch.object(sys, "argv", ["script.py", *f"{TINY} {flags}".split()]):
        initialize_megatron()
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, ModelType(1))
    data, _, _ = build_train_valid_test_data_iterators(datasets_provider)
    returned, weights = [], []
    for _ in range(3):
        returned.append(
            train_step(step, data, model, optimizer, scheduler, model[0].config, get_forward_backward_func())[1:5]
        )
        weights.append(torch.cat([parameter.detach().float().flatten() for parameter in model[0].parameters()]))
    assert get_args().iteration == 3
    global_vars.clear_current_run()
    return returned, weights


@pytest.mark.parametrize("action", ["stop", "skip"])
@pytest.mark.parametrize("precision", ["--fp16 --initial-loss-scale 1024", "--bf16"])
def test_a_loop_of_ones_own_skips_a_step_whose_loss_is_not_finite(corpus, precision, action):
    """No weight changes, even with finite gradients, as in our own loop; the script learns whether to exit."""
    flags = f"{precision} --data-path {corpus} --train-iters 3 --eval-iters 0 --nonfinite-action {action} {EXACT}"
    returned, weights = loop_with_a_bad_loss(flags, bad_step=1)
    skipped = (1, False, action == "stop", int(action == "stop"))
    assert returned == [(0, False, False, 0), skipped, skipped if action == "stop" else (0, False, False, 0)]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2]) == (action == "stop")
