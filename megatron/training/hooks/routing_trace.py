"""--moe-routing-trace-path: writes the experts to which each token is sent, as JSON lines."""

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from safetensors.torch import save_file
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.parameters import info_of
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training.config.log import RecordsConfig
from megatron.training.hooks.hook import Hook
from megatron.training.hooks.step_tensors import routers_of


class RoutingTrace(Hook):
    """Records the choices of the routers in training, and writes them after each step. Waits for the device to write.

    Raises UserError if the file cannot be written when the run starts.
    """

    def __init__(self, flags: RecordsConfig, model: Sequence[nn.Module], rank: int) -> None:
        assert flags.moe_routing_trace_path is not None
        self.flags, self.rank = flags, rank
        self.routers = routers_of(model)
        self.folder = Path(flags.moe_routing_trace_path)
        self._file: TextIO | None = None
        self._found: list[tuple[int, dict[str, Tensor]]] = []
        self._steps = 0

    def on_start(self, iteration: int) -> None:
        """Opens the file, and writes the routers' weights if asked."""
        path = self.folder / f"rank_{self.rank:05d}.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            if self.flags.moe_routing_trace_dump_weights:
                weights = {info_of(router.weight).name: router.weight.detach().cpu().clone() for router in self.routers}
                save_file(weights, self.folder / f"weights_rank_{self.rank:05d}.safetensors")
        except OSError as error:
            raise UserError(f"--moe-routing-trace-path {self.folder}: {error.strerror}") from None
        for router in self.routers:
            router.observers.append(self._note)

    def _note(
        self, router: TopKRouter, hidden: Tensor | None, logits: Tensor, experts: Tensor, weights: Tensor
    ) -> None:
        noted = {"experts": experts, "weights": weights}
        if self.flags.moe_routing_trace_capture_logits:
            noted["logits"] = logits
        if self.flags.moe_routing_trace_capture_hidden_states and hidden is not None:
            noted["hidden_states"] = hidden
        self._found.append((router.layer_number, {name: tensor.detach() for name, tensor in noted.items()}))

    def after_step(self, iteration: int) -> None:
        """Writes the lines of a step."""
        if self._file is None:
            return
        counts: Counter[int] = Counter()
        for layer, noted in self._found:
            line: dict[str, Any] = {"iteration": iteration, "micro_batch": counts[layer], "layer": layer}
            counts[layer] += 1
            self._file.write(json.dumps(line | {name: tensor.tolist() for name, tensor in noted.items()}) + "\n")
        self._file.flush()
        self._found.clear()
        self._steps += 1
        if self._steps == self.flags.moe_routing_trace_max_training_iters:
            self._close()

    def on_exit(self, iteration: int) -> None:
        """Closes the file."""
        self._close()

    def _close(self) -> None:
        for router in self.routers:
            with contextlib.suppress(ValueError):  # not registered
                router.observers.remove(self._note)
        if self._file is not None:
            self._file.close()
            self._file = None
