"""Checks that the data sets of a run and its tokenizer fit together, before the model is built."""

import sys
from functools import partial

from megatron.core.dist_checkpointing.coordination import RankCoordinator
from megatron.core.utils.url_keys import hide_keys
from megatron.data.preparation.checks import bytes_to_read, check_data, check_manifest
from megatron.data.preparation.manifest import get_manifest_path
from megatron.data.tokenizer.base import Tokenizer
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.masked_data import bert_dataset_config, t5_dataset_config
from megatron.training.data.sources import gpt_dataset_config, prefixes_of_run

_DATASET_CONFIGS = {"gpt": gpt_dataset_config, "bert": bert_dataset_config, "t5": t5_dataset_config}
"""For each model family: the function that makes the config of its data sets, which checks the tokenizer."""


def check_data_of_run(config: PretrainConfig, tokenizer: Tokenizer, *, reads_data: bool = True) -> None:
    """Raises UserError, the same on all ranks, if another tokenizer made the data of the run, or if the tokenizer lacks
    a special token that samples of the model's family need. Leaves out data that a script builds. Without `reads_data`
    only manifests are compared with the tokenizer; otherwise files are compared with their manifests, and ids are read
    where there is none, as far as that takes seconds. Collective."""
    of_script = config.data.datasets_of_script or config.data.dataloader_type == "external"
    if not of_script and config.data.sources():
        RankCoordinator().run_on_first(partial(_check_data, config, tokenizer, reads_data))


def _check_data(config: PretrainConfig, tokenizer: Tokenizer, reads_data: bool) -> None:
    if config.model.model_family is not None:
        _DATASET_CONFIGS[config.model.model_family](config, tokenizer)
    if config.training.sft:  # conversations are encoded when they are read
        return
    vocab_size = config.tokenizer.model_vocab_size(tokenizer.vocab_size)
    prefixes = sorted(prefixes_of_run(config))
    if not reads_data:
        for prefix in prefixes:
            check_manifest(prefix, tokenizer, vocab_size, _warn, files=False)
        return
    most_bytes = bytes_to_read(len(prefixes))
    unknown = [prefix for prefix in prefixes if check_data(prefix, tokenizer, vocab_size, _warn, most_bytes) is None]
    if unknown:
        others = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        _warn(
            f"{get_manifest_path(unknown[0])}{others}: no manifest, so the tokenizer of these ids is unknown; they are "
            "compared with the vocabulary when they are read (tools/preprocess_data.py writes manifests)"
        )


def _warn(message: str) -> None:
    print(f"warning: {hide_keys(message)}", file=sys.stderr, flush=True)
