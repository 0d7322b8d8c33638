"""Known bugs of encoders with decoders."""

from parity.mutations.mutation import Mutation

T5 = [
    Mutation(
        "encoder-gradient-of-a-stage",
        "the encoder's output gets no gradient from decoder stages after the first",
        "core/models/T5/t5_model.py",
        "torch.cat([hidden, encoded])",
        "torch.cat([hidden, encoded.detach()])",
        "t5-learned/pp3-two-stacks/default",
    ),
    Mutation(
        "relative-bias-not-summed",
        "each pipeline stage of the decoder keeps its own gradient of the relative position bias",
        "core/models/T5/t5_model.py",
        'tied = groups.size("pp") > 1',
        'tied = is_encoder and groups.size("pp") > 1',
        "t5/pp4-split+recompute-all-parts/per-token",
    ),
    Mutation(
        "cross-attention-sees-padding",
        "decoder stages after the first do not mask the encoder's padding",
        "core/models/T5/t5_model.py",
        "mask = _four_dims(encoder_decoder_attn_mask)",
        "mask = _four_dims(encoder_decoder_attn_mask) if self.pre_process else None",
        "t5-learned/pp3-two-stacks/default",
    ),
    Mutation(
        "encoder-gradient-of-a-rank",
        "each tensor parallel rank has the gradient of the encoder's output for its own heads only",
        "core/transformer/layer_inputs.py",
        "    if group_size(tp_group) > 1:\n",
        "    if group_size(tp_group) > 1 and sequence_parallel:\n",
        "t5/tp2-spread/per-token",
    ),
]
