"""Calls the attention of a layer spec: our own class, which takes `LayerInputs`, or a script's class, which takes
Megatron-LM's arguments."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.exceptions import UserError
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_inputs import LayerInputs
from megatron.core.utils.keywords import Keywords


def attend(
    core_attention: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    inputs: LayerInputs,
    attn_mask_type: AttnMaskType,
    **own: Any,
) -> Tensor:
    """Returns attention's output [s, b, a * d] for query [s, b, a, d], key and value [sk, b, g, d].

    A class whose `forward` has no parameter `inputs` is called as in Megatron-LM, with the keywords that it accepts:
    `forward(query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)`. Its mask is bool [b
    or 1, 1, s, sk] with True for hidden keys, including the keys after each token; None: no key is hidden. Raises
    UserError in cases that these arguments cannot express: parts of a sequence, packed documents, generation.
    """
    kind: Any = type(core_attention)
    keywords = Keywords.of_forward(kind)
    if "inputs" in keywords.names:
        found: Tensor = core_attention(query, key, value, mask, inputs=inputs, **own)
        return found
    name = kind.__name__
    if inputs.tokens.cu_seqlens is not None:
        raise UserError(f"{name} as core_attention of a layer spec: not with packed documents (reset_attention_mask)")
    if inputs.inference_context is not None:
        raise UserError(f"{name} as core_attention of a layer spec: not in generation with an inference_context")
    if inputs.tokens.part is not None:
        raise UserError(f"{name} as core_attention of a layer spec: not with context parallelism; use 1")
    if attn_mask_type is AttnMaskType.causal:
        later = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool, device=query.device).triu(1)[None, None]
        mask = later if mask is None else mask | later
    offered = {"attn_mask_type": attn_mask_type, "attention_bias": own.get("attention_bias"), "packed_seq_params": None}
    found = core_attention(query, key, value, mask, **keywords.chosen_from(offered))
    return found
