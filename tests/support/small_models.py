"""Small models that accumulate into main gradients, for tests of data parallelism and optimizers."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from megatron.core.initializers import Constant, Normal
from megatron.core.ops.embedding import embedding
from megatron.core.ops.linear import linear
from megatron.core.parameters import declare, initialize_parameters, name_parameters


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.empty(width))
        self.weight = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.empty(width))
        declare(self.norm, Constant(1.0))
        declare(self.weight, Normal(0.3))
        declare(self.bias, Normal(0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.norm / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return x + torch.tanh(linear(y, self.weight, self.bias))


class SmallModel(nn.Module):
    """ids [b, s] -> sum over tokens of the cross entropy with labels [b, s], weighted by a mask."""

    def __init__(
        self,
        vocabulary: int = 13,
        width: int = 6,
        layers: int = 3,
        tied: bool = True,
        seed: int = 5,
        dtype: torch.dtype = torch.float64,
        padded: int = 0,
        per_token: bool = False,
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(calculate_per_token_loss=per_token)
        self.vocabulary = vocabulary
        self.embedding = nn.Module()
        self.embedding.table = nn.Parameter(torch.empty(vocabulary + padded, width, dtype=dtype))
        declare(self.embedding.table, Normal(0.5), global_shape=(vocabulary, width), embedding_or_output=True)
        self.layers = nn.ModuleList(Layer(width).to(dtype) for _ in range(layers))
        if not tied:
            self.output_layer = nn.Module()
            self.output_layer.weight = nn.Parameter(torch.empty(vocabulary, width, dtype=dtype))
            declare(self.output_layer.weight, Normal(0.5))
        name_parameters(self)
        initialize_parameters(self, seed)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        x = embedding(ids, self.embedding.table)
        for layer in self.layers:
            x = layer(x)
        head = self.output_layer.weight if hasattr(self, "output_layer") else self.embedding.table
        logits = linear(x, head)[..., : self.vocabulary]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * mask.flatten()).sum()


def batch(sample: int, vocabulary: int = 13, rows: int = 1, length: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ids, labels and mask of `rows` samples from number `sample` on. They depend only on these numbers."""
    all_rows = []
    for row in range(sample, sample + rows):
        generator = torch.Generator().manual_seed(1000 + row)
        text = torch.randint(vocabulary, (length + 1,), generator=generator)
        all_rows.append((text[:-1], text[1:], torch.rand(length, generator=generator) < 0.8))
    ids, labels, mask = (torch.stack(column) for column in zip(*all_rows, strict=True))
    return ids, labels, mask.double()
