"""Steps of micro-batches outside a run, and the functions of a module that they call."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.nemo_runs import gpt
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.facades.nemo import lightning as nl
from megatron.facades.nemo.lightning.bases import base_class, defines, with_lightning
from megatron.facades.nemo.lightning.loss import MaskedTokenLossReductionWithLossMask, masked_token_loss
from megatron.facades.nemo.lightning.megatron_parallel import CallbackMethods
from megatron.facades.nemo.lightning.module_steps import functions_of, to_device
from megatron.facades.nemo.lightning.ranks import agreed, gathered, of_rank, rank_and_size, reduced


class Mean(nl.MegatronLossReduction):
    def forward(self, batch: Any, forward_out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (forward_out - batch["y"]).square().mean()
        return loss, {"avg": loss.detach()}

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Any]) -> Tensor:
        return torch.stack([report["avg"] for report in losses_reduced_per_micro_batch]).mean()


class Line(nn.Module):
    """A network with the attributes that schedules need."""

    def __init__(self) -> None:
        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def set_input_tensor(self, tensor: Any) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x

    def data_step(self, dataloader_iter: Any) -> Any:
        return next(dataloader_iter)[0]

    def forward_step(self, batch: Any) -> Tensor:
        return self(batch["x"])

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0 * self(batch["x"])

    def loss_reduction(self) -> Mean:
        return Mean()


class Names(CallbackMethods):
    def __init__(self) -> None:
        self.names: list[str] = []

    def on_megatron_step_start(self, step: Any) -> None:
        self.names.append(f"start of {step.num_microbatches} x {step.micro_batch_size}")

    def on_megatron_microbatch_start(self, step: Any, batch: Any, forward_callback: Any) -> None:
        self.names.append(f"batch of {type(forward_callback).__name__}")

    def on_megatron_reduce_microbatches_end(
        self, step: Any, microbatch_outputs: Any, loss_reduction: Any, reduced: Tensor
    ) -> None:
        self.names.append(f"reduced {reduced.item():g}")


def batches() -> list[dict[str, Tensor]]:
    return [{"x": torch.full((1, 2), float(x)), "y": torch.zeros(1, 2)} for x in (1, 3)]


def test_the_steps_run_micro_batches_and_tell_callbacks() -> None:
    names, line = Names(), Line()
    parallel = nl.MegatronParallel(line, callbacks=nl.CallbackConnector([names]))
    loss = parallel.training_step(batches())
    assert loss.item() == pytest.approx((4.0 + 36.0) / 2)
    assert line.weight.grad is not None and line.weight.grad.item() == pytest.approx((2 * 2 + 2 * 18) / 2)
    assert names.names == ["start of 2 x 1", "batch of Mean", "batch of Mean", "reduced 20"]
    assert parallel.validation_step(batches()).item() == 0.0 and parallel.test_step(batches()).item() == 20.0
    assert parallel(iter(batches()), num_microbatches=2, kind="test").item() == 20.0


def test_functions_of_the_call_replace_those_of_the_module() -> None:
    given = {"data_step": lambda data: {"x": torch.ones(1, 2), "y": torch.zeros(1, 2)}}
    more = {"forward_step": lambda model, batch: 3 * model(batch["x"]), "loss_reduction": lambda model: Mean()}
    parallel = nl.MegatronParallel(Line(), **given, **more)
    assert parallel.test_step(batches()[:1]).item() == pytest.approx(36.0)
    assert nl.MegatronParallel(Line()).test_step(batches()[:1], **more).item() == pytest.approx(36.0)


@pytest.mark.parametrize("name", ["precision_plugin", "ddp_config", "fsdp", "convert_module_fn"])
def test_what_the_run_decides_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"MegatronParallel\({name}=...\)"):
        nl.MegatronParallel(Line(), **{name: object()})


def test_a_function_for_one_kind_comes_before_the_common_one() -> None:
    line = Line()
    functions = {kind: functions_of(line, kind) for kind in ("training", "validation")}
    batch = batches()[0]
    values = {kind: each.forward_step(line, line, batch).sum().item() for kind, each in functions.items()}
    assert values == {"training": 4.0, "validation": 0.0}
    assert isinstance(functions_of(gpt(), "training").loss_reduction(gpt()), nl.MaskedTokenLossReduction)


def test_a_module_without_a_step_or_loss_is_refused() -> None:
    module: Any = nn.Linear(1, 1)
    with pytest.raises(UserError, match=r"Linear: no step for training; define training_step\(batch\)"):
        functions_of(module, "training")
    module.training_step = lambda batch: batch
    with pytest.raises(UserError, match=r"Linear: no loss for training; define loss_reduction"):
        functions_of(module, "training")


def test_the_masked_loss_counts_tokens() -> None:
    losses, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[1.0, 0.0, 1.0]])
    total, count = masked_token_loss(losses, mask)
    assert (total.item(), count.item()) == (5.0, 2)
    reduction = nl.MaskedTokenLossReduction()
    reduction.setup({"loss_mask": mask})
    first, second = reduction(losses)[2], reduction({"loss_mask": 1 - mask}, losses)[2]
    assert reduction.reduce([first, second]).item() == pytest.approx(7 / 3)
    assert MaskedTokenLossReductionWithLossMask()({}, (losses, mask))[0].item() == 5.0


def test_a_connector_calls_and_transforms() -> None:
    class Doubling:
        def change(self, value: int, by: int) -> int:
            return value * by

    callback = Doubling()
    connector = nl.CallbackConnector().add(callback)
    assert callback in connector and object() not in connector
    assert connector.transform_event("change", 3, by=2) == 6 and connector.transform_event("other", 3) == 3


def test_tensors_of_nested_batches_move_to_the_device() -> None:
    moved = to_device({"a": [torch.ones(1, device="cpu")], "b": ("text", None)})
    assert moved["a"][0].device.type == "cpu" and moved["b"] == ("text", None)


def test_classes_are_lightnings_only_where_it_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type("Strategy", (), {})
    assert with_lightning(Line, "strategies", "Strategy") is Line
    module = type("module", (), {"Strategy": theirs})
    monkeypatch.setitem(__import__("sys").modules, "lightning.pytorch.strategies", module)
    assert isinstance(nl.MegatronStrategy.__new__(nl.MegatronStrategy), theirs)
    assert defines(Line(), "forward_step") and not defines(Line(), "training_step")
    assert not defines(nn.Linear(1, 1), "training_step") and not defines(nn.Module(), "forward")


def test_without_lightning_modules_have_small_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    module = base_class("LightningModule")()
    module.log_dict({"a": 1})
    assert isinstance(module, nn.Module) and module.trainer is None
    data = base_class("LightningDataModule")()
    data.prepare_data(), data.setup("fit"), data.teardown("fit")
    assert nl.Callback is base_class("Callback")
    with pytest.raises(AttributeError):
        print(nl.FSDPStrategy)


def test_ranks_of_one_process() -> None:
    one = torch.ones(2)
    assert rank_and_size() == (0, 1) and gathered(one).shape == (1, 2) and reduced(one, "mean") is one
    assert agreed(True, True) and not agreed(False, False) and of_rank("text", 0) == "text"
    strategy = nl.MegatronStrategy()
    assert strategy.is_global_zero and strategy.world_size == 1 and strategy.local_rank == 0
    assert strategy.reduce(one).sum() == 2 and strategy.broadcast(3) == 3 and strategy.all_gather(one).shape == (1, 2)
    assert strategy.reduce_boolean_decision(True) and strategy.root_device.type == "cpu"
    strategy.barrier(), strategy.model_to_device()
