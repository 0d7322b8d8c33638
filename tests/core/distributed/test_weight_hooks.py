"""In which order modules' backwards begin: what is gathered ahead follows it."""

from torch import nn

from megatron.core.distributed.weight_hooks import WeightReader, backward_order


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(1, 1)
        self.experts = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))


def test_the_last_begins_first_and_a_module_before_those_inside_it() -> None:
    embedding, first, second, head = nn.Linear(1, 1), Layer(), Layer(), nn.Linear(1, 1)
    modules = [embedding, first, first.attention, first.experts, first.experts[0], second, second.experts, head]
    order = backward_order([WeightReader(module, ()) for module in modules])
    expected = [head, second, second.experts, first, first.experts, first.experts[0], first.attention, embedding]
    assert [modules[number] for number in order] == expected
