"""GPT samples rearranged for fill in the middle (Bavarian et al. 2022, arXiv:2207.14255)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.exceptions import UserError
from megatron.data.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig


@dataclass
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """The data of a run with --fim-data."""

    fim_rate: float = 0.5
    """Probability that a document (or a fragment of it) is rearranged."""

    fim_spm_rate: float = 0.5
    """Probability that a rearranged text puts the suffix before the prefix."""

    fim_prefix_token: str = "<fim_prefix>"
    fim_middle_token: str = "<fim_middle>"
    fim_suffix_token: str = "<fim_suffix>"

    fim_eod_token: str | None = None
    """Token between documents; None: the tokenizer's."""

    fim_split_sample: str | None = None
    """Token that divides a document into fragments, which are rearranged one by one; None: rearrange whole
    documents."""

    fim_fragment_rate: float | None = None
    """Probability that a fragment is rearranged; None: fim_rate."""

    fim_no_prefix: str | None = None
    """Fragments that begin with this text are not rearranged."""

    fim_extra_tokens: dict[str, str | None] | None = None
    """The marks in the form of Megatron-LM's scripts: the tokens prefix, middle, suffix and eod by these names, which
    replace the fields above; pad has no effect."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for role in ("prefix", "middle", "suffix", "eod"):
            token = (self.fim_extra_tokens or {}).get(role)
            if token is not None:
                setattr(self, f"fim_{role}_token", token)


class GPTFIMDataset(GPTDataset):
    """GPTDataset whose documents are cut at two random characters into prefix, middle and suffix and rearranged:

    prefix first: <prefix> prefix <suffix> suffix <middle> middle; suffix first: <prefix> <suffix> suffix <middle>
    prefix middle. If a sample contains a part of a document, this part counts as a document. A sample keeps its length:
    longer text is cut, and shorter text is padded, without loss at padding. The choices depend only on the seed and the
    sample's id.

    Raises UserError if a mark is not exactly one token.
    """

    config: GPTFIMDatasetConfig

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        config = self.config
        self._prefix, self._middle, self._suffix = (
            self._token(name) for name in ("fim_prefix_token", "fim_middle_token", "fim_suffix_token")
        )
        self._eod = config.tokenizer.eod if config.fim_eod_token is None else self._token("fim_eod_token")
        self._divider = None if config.fim_split_sample is None else self._token("fim_split_sample")

    def _token(self, field: str) -> int:
        text = getattr(self.config, field)
        ids = self.config.tokenizer.tokenize(text)
        if len(ids) != 1:
            flag = "--" + field.replace("_", "-")
            raise UserError(f"{flag} {text}: must be one token of the tokenizer, which has {len(ids)} for it")
        return int(ids[0])

    def read_sample(self, idx: int) -> np.ndarray:
        """Returns the tokens of sample `idx`, rearranged; at most as many as are stored."""
        stored = super().read_sample(idx)
        random = np.random.default_rng([self.config.random_seed, idx])
        parts = [
            self._rearranged_document(document, random) for document in np.split(stored, _after(stored, self._eod))
        ]
        return np.concatenate(parts)[: len(stored)].astype(stored.dtype)

    def _rearranged_document(self, document: np.ndarray, random: np.random.Generator) -> np.ndarray:
        ends = len(document) > 0 and document[-1] == self._eod
        body, end = (document[:-1], document[-1:]) if ends else (document, document[:0])
        if self._divider is None:
            return np.concatenate([self._rearranged(body, random, self.config.fim_rate), end])
        if random.random() >= self.config.fim_rate:
            return document
        rate = self.config.fim_fragment_rate
        parts: list[np.ndarray] = []
        for fragment in np.split(body, _after(body, self._divider)):
            divided = len(fragment) > 0 and fragment[-1] == self._divider
            text, mark = (fragment[:-1], fragment[-1:]) if divided else (fragment, fragment[:0])
            parts += [self._rearranged(text, random, self.config.fim_rate if rate is None else rate), mark]
        return np.concatenate([*parts, end])

    def _rearranged(self, ids: np.ndarray, random: np.random.Generator, rate: float) -> np.ndarray:
        """Returns a text rearranged with probability `rate`, else unchanged."""
        if len(ids) == 0 or random.random() >= rate:
            return ids
        tokenizer = self.config.tokenizer
        text = tokenizer.detokenize(ids.tolist())
        if self.config.fim_no_prefix is not None and text.startswith(self.config.fim_no_prefix):
            return ids
        first, last = sorted(random.integers(0, len(text) + 1, size=2).tolist())
        prefix, middle, suffix = (tokenizer.tokenize(part) for part in (text[:first], text[first:last], text[last:]))
        if random.random() < self.config.fim_spm_rate:
            found = [self._prefix, self._suffix, *suffix, self._middle, *prefix, *middle]
        else:
            found = [self._prefix, *prefix, self._suffix, *suffix, self._middle, *middle]
        return np.array(found, ids.dtype)


def _after(ids: np.ndarray, mark: int) -> np.ndarray:
    """Positions after each occurrence of `mark`, where the ids are divided; none after the last id."""
    positions = np.flatnonzero(ids == mark) + 1
    return positions[positions < len(ids)]
