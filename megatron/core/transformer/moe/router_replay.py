"""Routing replay: routers record the experts that they choose, or take recorded ones instead of choosing.

A model that is trained on text from another copy of itself can then send each token to the experts that generated it.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.utils.recompute_cache import run_once_under_recompute


class RouterReplay:
    """The recorded experts of one router: a tensor int64 [t, k] for each micro-batch, in the order of the forwards. It
    covers the tokens that this rank routes."""

    def __init__(self, layer_number: int = 0) -> None:
        self.layer_number = layer_number
        self.recorded: list[Tensor] = []
        """The experts of each forward since `record`."""
        self._records = False
        self._to_replay: list[Tensor] | None = None

    def record(self) -> None:
        """Starts to record; discards earlier records."""
        self.recorded, self._records, self._to_replay = [], True, None

    def replay(self, experts: Sequence[Tensor]) -> None:
        """Makes the next forwards take these experts, one tensor each."""
        self._records, self._to_replay = False, list(experts)

    def stop(self) -> None:
        """Ends recording or replaying; keeps the records."""
        self._records, self._to_replay = False, None

    def given(self, tokens: int, topk: int) -> Tensor | None:
        """Returns the given experts for the tokens of this forward; None if the router chooses. Raises UserError if no
        tensor of experts is left, or if the next one is for another number of tokens."""
        if self._to_replay is None:
            return None
        experts: Tensor = run_once_under_recompute((self, "replayed experts"), self._next)
        if tuple(experts.shape) != (tokens, topk):
            raise UserError(
                f"routing replay in layer {self.layer_number}: the experts given have the shape "
                f"{list(experts.shape)}, but this rank routes {tokens} tokens to {topk} experts each"
            )
        return experts

    def _next(self) -> Tensor:
        if not self._to_replay:
            raise UserError(
                f"routing replay in layer {self.layer_number}: there are no experts for this forward; give one tensor "
                "for each micro-batch"
            )
        return self._to_replay.pop(0)

    def note(self, experts: Tensor) -> None:
        """Records the experts [t, k] of a forward while recording is on; a recomputed layer is recorded once."""
        if self._records:
            run_once_under_recompute((self, "recorded experts"), lambda: self.recorded.append(experts.detach().clone()))


def router_replays(model: nn.Module) -> list[RouterReplay]:
    """Returns the replays of a model's routers, in the order of its layers. They exist with
    `moe_enable_routing_replay`."""
    found = [getattr(module, "replay", None) for module in model.modules()]
    return [replay for replay in found if isinstance(replay, RouterReplay)]
