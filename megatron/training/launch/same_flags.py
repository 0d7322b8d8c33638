"""Finds ranks that were started with different flags, before they compute together."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence

from megatron.core.declarations.config_fields import value_text
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.exceptions import UserError
from megatron.training.config.flag_table import flag_table
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import CHOSEN

_OF_ONE_MACHINE = frozenset({"local_rank", "data_cache_path", "metrics_path"})
"""Fields that may differ between ranks: they do not change what is computed, and may name a disk of one machine."""

_NAMED_RANKS = 4


def check_same_flags(config: PretrainConfig) -> None:
    """Raises UserError on every rank if ranks have different values of a flag; it names the flags, the values and the
    ranks. Collective over all ranks of torch.distributed.

    Ranks compare a digest. Only if digests differ, one rank of each digest sends its values.
    """
    ranks = RankCoordinator()
    values, given = {}, set()
    for field, value in config.flat().items():
        flag = flag_table().get(field)
        if flag is not None and field not in _OF_ONE_MACHINE:
            values[flag.spelling] = value_text(value)
            if config.provenance.get(field) in CHOSEN:
                given.add(flag.spelling)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    digests = ranks.gather(digest)
    if len(set(digests)) > 1:
        speaks = digests.index(digest) == ranks.rank
        told = [found for found in ranks.gather([values, sorted(given)] if speaks else None) if found is not None]
        by_digest = dict(zip(dict.fromkeys(digests), told, strict=True))
        named = {flag for _, flags in told for flag in flags}
        raise UserError("; ".join(differences([by_digest[one][0] for one in digests], named)))


def differences(values: Sequence[Mapping[str, str]], given: Collection[str]) -> list[str]:
    """Returns a sentence for each flag that has several values, from the flags of each rank. `given` has the flags that
    any rank was given; the values of the others follow from other flags and from the host."""
    sentences = []
    for flag in values[0]:
        holders: dict[str, list[int]] = {}
        for rank, own in enumerate(values):
            holders.setdefault(own.get(flag, "None"), []).append(rank)
        if len(holders) > 1:
            told = " and ".join(f"{value} on {_named(ranks)}" for value, ranks in holders.items())
            advice = (
                "start every rank with the same flags"
                if flag in given
                else "no flag sets it, and hosts with other GPUs or numbers of ranks have another default; give the "
                "flag, or its opposite, to every rank"
            )
            sentences.append(f"{flag} is {told}: {advice}")
    return sentences


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) > _NAMED_RANKS:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:_NAMED_RANKS]))}, ...)"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
