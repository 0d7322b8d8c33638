"""What Megatron-LM's entry scripts use of the package, release by release.

The facts are tests/data/megatron_lm_script_names.json. The programs of this folder use the package only through
`Facts`, which finds a name in its home of a release, and permits only what the script of that release does: its names,
its arguments `args.X`, and calls with as many arguments by position and with the same keywords. `unused` tells what a
program has left out.
"""

import importlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.core.exceptions import UserError

TABLE: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "data/megatron_lm_script_names.json").read_text())
RELEASES = ["0.5", "0.6", "0.7", "0.8", "0.9", "0.11", "0.14", "0.15", "0.16"]
LOOP_RELEASES = RELEASES[3:]
"""Releases whose simple loop runs: those before build a dataset in a way that their own class refuses."""
_PATCH = {"0.11": "0.11.0", "0.16": "0.16.1"}

NO_PACKAGE = "needs a package that is not here; scripts go on without it"
NO_PLAN = "only if the schedule asks for a plan, which ours does not"
LEFT_OUT = {
    "megatron.post_training": NO_PACKAGE,
    "args.modelopt_enabled": NO_PACKAGE,
    "args.memory_snapshot_path": "only when a GPU has no memory left",
    "args.overlap_moe_expert_parallel_comm": NO_PLAN,
    "megatron.core.models.gpt.GPTModel.build_schedule_plan": NO_PLAN,
    "megatron.core.pipeline_parallel.schedules.forward_backward_func": "the name of a result; its call is checked",
}
"""Beginnings of names that no program uses, and why."""
_LEGACY_MODEL_CALL = ("megatron.core.models.gpt.GPTModel.__call__", 3, "labels")
"""From 0.14 on only a model of megatron.legacy is called so, and there is none."""


class Facts:
    """The facts of one script (such as pretrain_gpt) and release. Names are given by their last words, as many as tell
    them apart: "ModelType", "ModelType.encoder_or_decoder"."""

    def __init__(self, script: str, release: str) -> None:
        self._calls: dict[str, set[tuple[int, str]]] = {}
        self._used: set[Any] = set()
        self.args = Arguments(self)
        full = _PATCH.get(release, f"{release}.0")
        for fact in TABLE:
            found = {(n, words) for of, at, n, words in fact.get("calls", []) if of == script and full in at}
            where = fact.get("where", {}).get(script, fact["releases"] if script in fact["scripts"] else [])
            if found or full in where:
                self._calls[fact["name"]] = found
        assert self._calls, f"no facts about {script} of {release}"

    def __contains__(self, words: str) -> bool:
        return bool(self._named(words))

    def names(self) -> list[str]:
        """Returns all names that the script uses."""
        return [*self._calls]

    def _named(self, words: str) -> list[str]:
        return [name for name in self._calls if f".{name}".endswith(f".{words}")]

    def use(self, words: str) -> str:
        """Notes that a name is used, and returns it whole."""
        named = self._named(words)
        assert len(named) == 1, f"{words}: the script of this release uses {named or 'no such name'}"
        self._used.add(named[0])
        return named[0]

    def __getitem__(self, words: str) -> Any:
        """The object of a name, imported from its home of the release."""
        parts = self.use(words).split(".")
        end = next(n for n in range(len(parts), 0, -1) if _is_module(".".join(parts[:n])))
        found: Any = importlib.import_module(".".join(parts[:end]))
        for part in parts[end:]:
            found = getattr(found, part)
        return found

    def call(self, words: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the object of a name as the script does."""
        return self.through(self[words], words, *args, **kwargs)

    def through(self, function: Callable[..., Any], words: str, *args: Any, **kwargs: Any) -> Any:
        """Calls `function`, which is the object of a name: a method of an object, or a result."""
        name, call = self.use(words), (len(args), " ".join(sorted(kwargs)))
        recorded = self._calls[name]
        assert not recorded or call in recorded, f"{name}: {call} is not among the script's calls {sorted(recorded)}"
        self._used.add((name, *call))
        return function(*args, **kwargs)

    def fill(self, words: str, *args: Any, order: Sequence[str] = (), **values: Any) -> Any:
        """Calls the object of a name with the arguments that the script gives: `args`, then arguments of the run in
        `order`, as many as there are by position; keywords from `values`, or else arguments of the run."""
        ((count, keywords),) = self._calls[self.use(words)]
        positional = [*args, *(getattr(self.args, name) for name in order[: max(0, count - len(args))])]
        return self.call(words, *positional, **self._values(keywords, values))

    def _values(self, keywords: str, values: dict[str, Any]) -> dict[str, Any]:
        words = keywords.split()
        return {word: values[word] if word in values else getattr(self.args, OPTIONS.get(word, word)) for word in words}

    def refused(self, words: str, *args: Any, **values: Any) -> None:
        """Makes a call that only a flag without a meaning here brings: it must end in a sentence."""
        with pytest.raises(UserError):
            self.fill(words, *args, **values) if self._calls[self.use(words)] else self.call(words, *args, **values)

    def last(self, words: str) -> str:
        """Notes that a name is used, and returns its last word."""
        return self.use(words).rpartition(".")[2]

    def read(self, owner: Any, words: str) -> Any:
        """Returns an attribute of an object, such as "TransformerConfig.num_layers"."""
        return getattr(owner, self.last(words))

    def unused(self) -> list[str]:
        """Returns the facts that the program has not used."""
        names = [name for name in self._calls if not name.startswith(tuple(LEFT_OUT))]
        calls = [(name, *call) for name in names for call in self._calls[name]]
        if any("loss_mask" in call[-1].split() for call in calls if call[0] == _LEGACY_MODEL_CALL[0]):
            calls.remove(_LEGACY_MODEL_CALL)
        return [str(one) for one in (*names, *calls) if one not in self._used]


OPTIONS = {
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
    "fast_cache_load": "dataloader_fast_cache_load",
    "masking_probability": "mask_prob",
    "max_sequence_length": "max_position_embeddings",
    "mock": "mock_data",
    "path_to_cache": "data_cache_path",
    "random_seed": "seed",
    "rope_scaling": "use_rope_scaling",
    "sequence_length": "seq_length",
    "sequence_length_decoder": "decoder_seq_length",
    "short_sequence_probability": "short_seq_prob",
    "vocab_size": "padded_vocab_size",
}
"""The arguments of the run that keywords of another name get."""


class Arguments:
    """The run's arguments (`get_args()`), of which only those can be read that the script reads."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def __getattr__(self, name: str) -> Any:
        self._facts.use(f"args.{name}")
        return getattr(self._facts.call("get_args"), name)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # ValueError: a module that is made when it is imported
        return False
