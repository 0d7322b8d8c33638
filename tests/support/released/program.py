"""What the programs of GPT, BERT and T5 have in common: data, timers, start."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from support.released.conventions import CONVENTIONS, taking
from support.released.facts import Facts
from torch import Tensor

PROGRAM_START = time.time()
MASKING = {
    "masking_do_full_word": True,
    "masking_do_permutation": False,
    "masking_use_longer_ngrams": False,
    "mock": False,
}
"""Values that BERT and T5 give to their dataset config."""


IMPORTED = [
    *("core.mpu", "core.parallel_state", "core.tensor_parallel", "inprocess_restart", "legacy.model", "megatron.model"),
    *("ModelType", "MegatronTokenizer"),
]
"""Modules and names that scripts import, even if they do not use them."""


class Program:
    """A pretraining program that makes the calls of an entry script of a release. Subclasses define `build_model`,
    `dataset` (the class of the datasets and their config), `batch` and `forward_step`."""

    script: str
    tokenizer_type = "BertWordPieceLowerCase"
    timer = "batch-generator"

    def __init__(self, release: str) -> None:
        self.release, self.conventions = release, CONVENTIONS[release]
        self.facts = Facts(self.script, release)
        self.args = self.facts.args
        for name in IMPORTED:
            if name in self.facts:
                self.facts[name]

    def unused(self) -> list[str]:
        """Returns the facts that this run has not used."""
        return self.facts.unused()

    # Start

    def model_type(self) -> Any:
        return self.facts["ModelType.encoder_or_decoder"]

    def model_parameters(self) -> list[str]:
        """Names of the model provider's parameters."""
        conventions = self.conventions
        names = ["pre_process", "post_process"] + ["vp_stage"] * conventions.virtual_models
        return names + ["config", "pg_collection"] * conventions.given_config

    def start(self) -> None:
        """Trains, with the flags in sys.argv."""
        stage = ["vp_stage"] * (self.conventions.virtual_datasets and self.script != "pretrain_t5")
        datasets = taking(self.build_datasets, "train_val_test_num_samples", *stage)
        datasets.is_distributed = True
        pretrain, given = self.facts["pretrain"], self.keywords()
        if "inprocess_restart" in self.facts:
            pretrain, given["store"] = self.facts.call("maybe_wrap_for_inprocess_restart", pretrain)
        self.facts.through(
            pretrain,
            "pretrain",
            datasets,
            self.model_provider(),
            self.model_type(),
            self.step(),
            args_defaults={"tokenizer_type": self.tokenizer_type},
            **given,
        )

    def keywords(self) -> dict[str, Any]:
        """More keywords of `pretrain`."""
        return {**self.rank_functions()}

    def rank_functions(self) -> dict[str, Any]:
        """Functions that choose ranks of a pipeline, by their keywords."""
        return {}

    def model_provider(self) -> Any:
        return taking(self.build_model, *self.model_parameters())

    def step(self) -> Any:
        return taking(self.forward_step, "data_iterator", "model")

    def config_of(self, facts: Facts, config: Any = None) -> Any:
        """Returns the config of the model, if it is not given."""
        self_made = facts.call("core_transformer_config_from_args", facts.call("get_args"))
        return self_made if config is None else config

    def core_models(self, facts: Facts | None = None) -> bool:
        """Whether the flags ask for the models of megatron.core."""
        facts = facts or self.facts
        old = "args.use_mcore_models" in facts
        return facts.args.use_mcore_models if old else not facts.args.use_legacy_models

    # Data

    def tokenizer(self) -> Any:
        """Returns the tokenizer of the datasets."""
        of_run = self.facts["get_tokenizer"]
        if "build_tokenizer" in self.facts and not self.args.legacy_tokenizer:
            return self.facts.call("build_tokenizer", self.facts.call("get_args"))
        return of_run()

    def blends(self) -> tuple[Any, Any]:
        """Returns the blend of all splits, and that of each split."""
        if "get_blend_and_blend_per_split" in self.facts:
            return self.facts.call("get_blend_and_blend_per_split", self.facts.call("get_args"))
        args = self.args
        words = [args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path]
        if "get_blend_from_list" in self.facts:
            words = [self.facts.call("get_blend_from_list", one) for one in words]
        return words[0], words[1:]

    def dataset_values(self) -> dict[str, Any]:
        """Values of keywords of the dataset config that are not arguments of the run."""
        blend, per_split = self.blends()
        return {"blend": blend, "blend_per_split": per_split, "tokenizer": self.tokenizer()}

    def holds_data(self, vp_stage: int | None) -> bool:
        """Whether this rank builds datasets."""
        return self.facts.call("get_tensor_model_parallel_rank") == 0

    def build_datasets(self, train_val_test_num_samples: Sequence[Any], vp_stage: int | None = None) -> Sequence[Any]:
        """Builds the datasets of the three splits."""
        facts = self.facts
        for ranks_of in self.rank_functions().values():  # the trainer asks only for more than one process
            assert 0 in ranks_of([0, 1])

        def here() -> bool:
            return self.holds_data(vp_stage)

        kind, config = self.dataset({**self.dataset_values(), "is_built_on_rank": here})
        facts.call("print_rank_0", f"{self.script} of {self.release} builds its datasets")
        words = (kind, train_val_test_num_samples, *(() if self.release == "0.5" else (here,)), config)
        builder = facts.call("BlendedMegatronDatasetBuilder", *words)
        return facts.through(builder.build, "BlendedMegatronDatasetBuilder.build")

    def timed_batch(self, *place: Any) -> Any:
        """Returns what `batch` does, and measures its time."""
        facts = self.facts
        timers = facts.call("get_timers")
        begun = facts.through(timers, "Timers.__call__", self.timer, log_level=2)
        facts.through(begun.start, "Timer.start")
        batch = self.batch(*place)
        facts.through(facts.through(timers, "Timers.__call__", self.timer).stop, "Timer.stop")
        return batch

    def broadcast(self, iterator: Any, names: str) -> dict[str, Tensor]:
        """Returns tensors of the next batch, which only the first tensor parallel rank has."""
        drawn = None if iterator is None else next(iterator)
        return self.facts.call("broadcast_data", names.split(), drawn, torch.int64)
