"""Published laws: the loss of a model by its parameters and tokens, and the cheapest model of a loss.

N are parameters, D tokens, C floating point operations. Losses are nats per token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

FLOPS_PER_TOKEN = 6.0
"""Training operations per parameter and token: 2 forward, 4 backward, without attention's scores (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1)."""
INFERENCE_FLOPS_PER_TOKEN = 2.0
"""Operations per parameter and token that a trained model reads or writes."""


@dataclass(frozen=True)
class ScalingLaw:
    """L(N, D) = irreducible + a / N^alpha + b / D^beta (Hoffmann et al. 2022, arXiv:2203.15556, equation 2), for dense
    decoders and data that is not repeated."""

    irreducible: float
    a: float
    alpha: float
    b: float
    beta: float
    source: str

    def loss(self, parameters: float, tokens: float) -> float:
        """Returns the predicted loss."""
        return self.irreducible + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def optimal_parameters(self, flops: float) -> float:
        """Returns the N of the least loss with 6 N D = `flops` (Hoffmann et al. 2022, equation 4)."""
        ratio = self.alpha * self.a / (self.beta * self.b)
        share = self.beta / (self.alpha + self.beta)
        return ratio ** (1 / (self.alpha + self.beta)) * (flops / FLOPS_PER_TOKEN) ** share

    def optimal_tokens(self, parameters: float) -> float:
        """Returns the D for which this N is the N of the least loss: both terms fall alike with more compute."""
        return (self.beta * self.b / (self.alpha * self.a) * parameters**self.alpha) ** (1 / self.beta)

    def parameters_for_tokens(self, tokens: float) -> float:
        """Returns the N for which these D are optimal: the inverse of `optimal_tokens`."""
        return (self.alpha * self.a / (self.beta * self.b) * tokens**self.beta) ** (1 / self.alpha)

    def tokens_for_loss(self, parameters: float, loss: float) -> float:
        """Returns the D with which a model of N parameters reaches a loss; infinity if no number does."""
        left = loss - self.irreducible - self.a / parameters**self.alpha
        return (self.b / left) ** (1 / self.beta) if left > 0 else math.inf

    def cheapest(self, loss: float, inference_tokens: float = 0.0, inference_price: float = 1.0) -> tuple[float, float]:
        """Returns N and D of the model that reaches a loss with the least cost 6 N D + `inference_price` 2 N D_inf
        (Sardana et al. 2023, arXiv:2401.00448, equations 2 and 3). `inference_price` is the price of an operation of
        inference in operations of training: the quotient of the two utilisations."""

        def cost(log_parameters: float) -> float:
            parameters = math.exp(log_parameters)
            trained = FLOPS_PER_TOKEN * self.tokens_for_loss(parameters, loss)
            return parameters * (trained + inference_price * INFERENCE_FLOPS_PER_TOKEN * inference_tokens)

        smallest = (self.a / (loss - self.irreducible)) ** (1 / self.alpha)  # reaches the loss with endless tokens
        best = _least(cost, math.log(smallest) + 1e-9, math.log(smallest) + 20)
        return math.exp(best), self.tokens_for_loss(math.exp(best), loss)


def _least(cost: Callable[[float], float], low: float, high: float) -> float:
    """Returns the place of the only minimum of a function between two numbers, by golden section."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    while high - low > 1e-9:
        if cost(left) < cost(right):
            high, right = right, left
            left = high - ratio * (high - low)
        else:
            low, left = left, right
            right = low + ratio * (high - low)
    return (low + high) / 2


CORRECTED = ScalingLaw(
    1.8172,
    482.01,
    0.3478,
    2085.43,
    0.3658,
    "Hoffmann et al. 2022 (arXiv:2203.15556), approach 3, constants of Besiroglu et al. 2024 (arXiv:2404.10102)",
)
"""The default: the constants that fit the published data."""
PUBLISHED = ScalingLaw(
    1.69, 406.4, 0.34, 410.7, 0.28, "Hoffmann et al. 2022 (arXiv:2203.15556), approach 3, constants as published"
)
"""Its ratio of tokens to parameters is far above that of the paper's other two approaches."""
RULE_OF_THUMB = 20.0
"""Tokens per parameter of approaches 1 and 2 of Hoffmann et al. 2022: Chinchilla's 1.4 trillion for 70 billion."""
