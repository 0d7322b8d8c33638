"""End-of-document and padding tokens of samples: document boundaries, positions, attention masks, the pad id."""

import numpy as np

from megatron.core.utils.warn import warn_on_first_rank
from megatron.data.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig

NO_PADDING = -1
"""Pad id of a tokenizer without padding; no token has it."""


def cumulative_lengths(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Returns int32 [documents + 1]: the first token of each document of a sample, then the sample's length.

    A document ends with its end-of-document token. Tokens after the last one are a document too.
    """
    ends = np.flatnonzero(tokens == eod) + 1
    if len(ends) and ends[-1] == len(tokens):
        ends = ends[:-1]
    boundaries = np.empty(len(ends) + 2, np.int32)
    boundaries[0] = 0
    boundaries[1:-1] = ends
    boundaries[-1] = len(tokens)
    return boundaries


def restarted_positions(cu_seqlens: np.ndarray) -> np.ndarray:
    """Returns int64 [s]: positions that start at 0 in each document."""
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    return np.arange(cu_seqlens[-1], dtype=np.int64) - np.repeat(starts, lengths)


def causal_mask(sequence_length: int) -> np.ndarray:
    """Returns bool [1, s, s], True where attention is masked: at keys after the query."""
    return np.triu(np.ones((1, sequence_length, sequence_length), bool), k=1)


def document_mask(cu_seqlens: np.ndarray) -> np.ndarray:
    """Returns bool [1, s, s], True where attention is masked: at keys after the query or in another document."""
    document = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
    return causal_mask(len(document)) | (document[:, None] != document[None, :])


def special_id(tokenizer: object, name: str) -> int | None:
    """Returns a special id of the tokenizer; None if it has none, which Megatron-LM's tokenizers express in three
    ways."""
    try:
        return getattr(tokenizer, name, None)
    except NotImplementedError:
        return None


def padding_id(config: BlendedMegatronDatasetConfig) -> int:
    """Returns the tokenizer's pad id; -1, which is no token, if there is none or if it is also another special token.

    The loss leaves out every occurrence of the pad id. If the id had a second meaning, it would leave out real tokens.
    """
    tokenizer = config.tokenizer
    pad = special_id(tokenizer, "pad")
    if pad is None or pad < 0:
        return NO_PADDING
    special = getattr(tokenizer, "special_tokens_dict", None) or {}
    others = {value for name, value in special.items() if "pad" not in name}
    others |= {special_id(tokenizer, "eos"), special_id(tokenizer, "eod")}
    if pad in others and not config.allow_ambiguous_pad_tokens:
        warn_on_first_rank(
            f"the tokenizer's pad id {pad} is also another special token, so it is not treated as padding, which would "
            "mask that token's loss (--allow-ambiguous-pad-tokens treats it as padding)"
        )
        return NO_PADDING
    return int(pad)
