"""Finds ranks that were started with different flags, and hosts that have other files than the others under the same
path, before a run trains: data, files of the tokenizer, and code.

One rank of each host reads them, and only if the run has several hosts. A small file is read whole. Of a large one its
size, evenly spread blocks, and what a data set's manifest says about it are compared.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

import megatron
from megatron.core.declarations.config_fields import value_text
from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.exceptions import UserError
from megatron.core.utils.files import sha256_of_file
from megatron.data.datasets.object_store import is_url
from megatron.data.preparation.manifest import get_manifest_path
from megatron.training.config.flag_table import flag_table
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import CHOSEN
from megatron.training.launch.process_state import machine_name

_WHOLE_BYTES = 16 << 20
"""A file of up to this size is read whole."""
_WHOLE_BYTES_OF_DATA = 1 << 30
_BLOCK_BYTES = 4096
_BLOCKS, _BLOCKS_OF_DATA = 64, 4096
"""Blocks of a file, and of all data sets together: a blend may have thousands."""
_TOKENIZER_FILES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
"""Files of a tokenizer's folder that are compared; it may have the weights of a model too."""
_NAMED_FILES = _NAMED_RANKS = 4

Digests = dict[str, str]
"""What a host has under each path: a digest and a size, or why it cannot be read."""


def check_same_inputs(config: PretrainConfig, prefixes: Callable[[PretrainConfig], Iterable[str]]) -> None:
    """Raises UserError on every rank if hosts have different data, tokenizer files or code; it names the files and the
    hosts. `prefixes` returns the prefixes of the data sets. Collective over all ranks of torch.distributed."""
    ranks = RankCoordinator()
    places = ranks.gather(_place())
    if len(set(places)) == 1:
        return
    speaks = places.index(places[ranks.rank]) == ranks.rank
    mine = digests_of_inputs(config, prefixes) if speaks else {}
    total = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest() if speaks else None
    told = ranks.gather([socket.gethostname(), total])
    totals = {total for _, total in told if total is not None}
    if len(totals) > 1:
        first = next(rank for rank, (_, other) in enumerate(told) if other == total) if speaks else None
        tables = ranks.gather(mine if first == ranks.rank else None)
        by_total = {told[rank][1]: table for rank, table in enumerate(tables) if table is not None}
        hosts = [(f"{host} (rank {rank})", by_total[one]) for rank, (host, one) in enumerate(told) if one is not None]
        raise UserError(input_differences(hosts))


def _place() -> str:
    """Returns a text that two ranks share only if they surely have the same files under the same paths."""
    words = [machine_name(), socket.gethostname(), os.getcwd(), os.environ.get("GROUP_RANK", ""), _code_folder()]
    with contextlib.suppress(OSError):
        words.append(os.readlink("/proc/self/ns/mnt"))
    return hashlib.sha256(" ".join(map(str, words)).encode()).hexdigest()[:16]


def input_differences(hosts: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Returns a sentence about the files that differ, from the name and the digests of each host."""
    sentences = []
    for path in dict.fromkeys(path for _, digests in hosts for path in digests):
        holders: dict[str, list[str]] = {}
        for host, digests in hosts:
            holders.setdefault(digests.get(path, "not there"), []).append(host)
        if len(holders) > 1:
            told = " and ".join(f"{found} on {_named(names)}" for found, names in holders.items())
            sentences.append(f"{path} is {told}")
    more = [f"and {len(sentences) - _NAMED_FILES} more files"] if len(sentences) > _NAMED_FILES else []
    named = "; ".join([*sentences[:_NAMED_FILES], *more])
    return f"hosts have different files: {named}; give all hosts the same files, or a shared file system"


def _named(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - 3} more hosts" if len(hosts) > 3 else ""
    return ", ".join(hosts[:3]) + more


def digests_of_inputs(config: PretrainConfig, prefixes: Callable[[PretrainConfig], Iterable[str]]) -> Digests:
    """Returns what this host has under the paths that the run reads."""
    found: Digests = {}
    for path in _files_of_flags(config):
        found[str(path)] = digest_of_file(path)
    with contextlib.suppress(UserError, OSError):  # a file of prefixes that cannot be read, which is among those above
        local = [prefix for prefix in sorted(prefixes(config)) if not is_url(prefix)]
        whole = min(_WHOLE_BYTES, _WHOLE_BYTES_OF_DATA // max(len(local), 1))
        blocks = max(4, min(_BLOCKS, _BLOCKS_OF_DATA // max(len(local), 1)))
        for prefix in local:
            parts = [f"{prefix}.idx", f"{prefix}.bin", get_manifest_path(prefix)]
            for path in map(Path, [prefix] if Path(prefix).is_file() else parts):
                if path.exists():
                    found[str(path)] = digest_of_file(path, whole, blocks)
    folder = _code_folder()
    for path in sorted(folder.rglob("*.py")):
        found[str(Path("megatron", path.relative_to(folder)))] = digest_of_file(path)
    script = Path(sys.argv[0])
    if script.suffix == ".py" and script.is_file():
        found[script.name] = digest_of_file(script)
    return found


def _code_folder() -> Path:
    return Path(next(iter(megatron.__path__)))


def _files_of_flags(config: PretrainConfig) -> Iterator[Path]:
    """Yields the files of the tokenizer, and those that name data sets."""
    names = [getattr(config.tokenizer, field) for field in config.tokenizer.files]
    data = config.data
    names += [config.tokenizer.chat_template, data.data_args_path, data.per_split_data_args_path, data.data_stages]
    for name in names:
        if name is None:
            continue
        path = Path(name)
        if path.is_dir():
            yield from (file for file in sorted(path.iterdir()) if file.suffix in _TOKENIZER_FILES)
        else:
            yield path


def digest_of_file(path: Path, whole: int = _WHOLE_BYTES, blocks: int = _BLOCKS) -> str:
    """Returns the digest and the size of a file; if it has more than `whole` bytes, the digest covers its size and
    `blocks` blocks. Says so if the file cannot be read."""
    try:
        size = path.stat().st_size
        if size <= whole:
            digest = sha256_of_file(path)
        else:
            hashed = hashlib.sha256(str(size).encode())
            with open(path, "rb") as file:
                for start in np.linspace(0, size - _BLOCK_BYTES, blocks, dtype=np.int64).tolist():
                    file.seek(start)
                    hashed.update(file.read(_BLOCK_BYTES))
            digest = hashed.hexdigest()
        return f"{digest[:12]} ({size} bytes)"
    except OSError as error:
        return f"unreadable ({error.strerror})"


_OF_ONE_MACHINE = frozenset({"local_rank", "data_cache_path", "metrics_path"})
"""Fields that may differ between ranks: they do not change what is computed, and may name a disk of one machine."""
_LOCAL_FOLDERS = frozenset({"non_persistent_local_ckpt_dir", "optimizer_nvme_offload_path", "param_nvme_offload_path"})
"""Fields that name a folder of a local disk, which hosts may have in different places. All have one, or none."""


def check_same_flags(config: PretrainConfig) -> None:
    """Raises UserError on every rank if ranks have different values of a flag; it names the flags, the values and the
    ranks. Collective over all ranks of torch.distributed.

    Ranks compare a digest. Only if digests differ, one rank of each digest sends its values.
    """
    ranks = RankCoordinator()
    if ranks.size == 1:
        return
    values, given = {}, set()
    for field, value in config.flat().items():
        flag = flag_table().get(field)
        if flag is not None and field not in _OF_ONE_MACHINE:
            values[flag.spelling] = "a folder" if value and field in _LOCAL_FOLDERS else value_text(value)
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
            told = " and ".join(f"{value} on {_named_ranks(ranks)}" for value, ranks in holders.items())
            advice = (
                "start every rank with the same flags"
                if flag in given
                else "no flag sets it, and hosts with other GPUs or numbers of ranks have another default; give the "
                "flag, or its opposite, to every rank"
            )
            sentences.append(f"{flag} is {told}: {advice}")
    return sentences


def _named_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > _NAMED_RANKS:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:_NAMED_RANKS]))}, ...)"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
