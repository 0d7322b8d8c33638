"""Generation with an encoder-decoder model: the encoder reads the prompts once, the decoder writes token by token."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from megatron.core.exceptions import UserError
from megatron.core.inference.generation import fill_up, write
from megatron.core.inference.sampling import SamplingParams, TextSoFar, next_tokens
from megatron.core.inference.static_context import StaticInferenceContext
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.transformer.layer_inputs import key_padding_mask


@torch.no_grad()
def generate_from_encoder(
    model: T5Model,
    prompts: Sequence[Sequence[int]],
    begin: int,
    max_new_tokens: int,
    sampling: SamplingParams,
    *,
    ends: Collection[int] = (),
    first_sequence: int = 0,
) -> list[list[int]]:
    """Returns the ids that the decoder writes for each prompt after the id `begin`: up to `max_new_tokens` ids. A row
    stops at any of the ids `ends`, which is not part of its result. The decoder keeps the keys and values of its own
    tokens and of the encoder's output. The result of a row does not depend on the other rows. `first_sequence` has the
    same meaning as in `generate`. The model must not be split over ranks. Raises UserError for a prompt without
    tokens."""
    if not all(prompts):
        raise UserError("a prompt has no tokens; an encoder needs one to read")
    model.eval()
    device = next(model.parameters()).device
    tokens = fill_up(prompts).to(device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    padding = key_padding_mask(torch.arange(tokens.shape[1], device=device) < lengths[:, None])
    begun = torch.full((len(prompts), 1), begin, device=device)
    encoded = model(tokens, begun, encoder_attn_mask=padding, output_encoder_hidden_only=True)
    texts = [TextSoFar(sampling, [begin], [], ends, first_sequence + number) for number in range(len(prompts))]
    context = StaticInferenceContext(len(prompts), max(1, max_new_tokens))
    context.begin(torch.ones_like(lengths), 1)

    def choose(newest: Tensor | None) -> Tensor:
        if newest is not None:
            context.advance()
        logits = model(
            tokens,
            begun if newest is None else newest[:, None],
            encoder_decoder_attn_mask=padding,
            encoder_hidden_states=encoded,
            inference_context=context,
        )
        return next_tokens(logits[:, -1], texts)

    return write(texts, max_new_tokens, ends, choose)
