"""Names of NeMo and of NeMo-Run."""

import copy
import subprocess
import sys

import pytest

from megatron.core.exceptions import UserError
from megatron.facades.nemo import lightning as nl
from megatron.facades.nemo import llm, run

SCRIPT = """
import sys
sys.modules["lightning"] = None
from megatron.facades import nemo
nemo.install()
nemo.install()
import nemo_run as run
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.llm.gpt.data.mock import MockDataModule
from nemo.collections.llm.gpt.model.base import GPTModel, gpt_data_step
from nemo.collections.nlp.modules.common.tokenizer_utils import get_nmt_tokenizer
from nemo.lightning.megatron_parallel import MaskedTokenLossReduction, MegatronParallel
from nemo.lightning.pytorch.callbacks import ModelCheckpoint
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule
from nemo.lightning.pytorch.strategies import MegatronStrategy
import nemo.collections.llm as again
from nemo.collections.llm.recipes import llama31_8b
from nemo.collections.llm.recipes.optim.adam import distributed_fused_adam_with_cosine_annealing
from nemo.lightning.pytorch.callbacks import NsysCallback
from nemo.lightning.pytorch.callbacks.garbage_collection import GarbageCollectionCallback
from nemo.utils import logging
from nemo.utils.exp_manager import TimingCallback
class Module(nl.LightningModule, nl.io.IOMixin, nl.io.ConnectorMixin):
    pass
logging.info("unseen")
from megatron.facades.nemo import lightning
assert nl.Trainer is lightning.Trainer and nl.MegatronStrategy is MegatronStrategy and again.GPTModel is GPTModel
try:
    from nemo.collections import asr
except ImportError:
    print("no speech here")
"""


def test_scripts_of_nemo_find_their_names_without_nemo_and_lightning() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout == "no speech here\n", done.stderr


def recipe() -> run.Partial:
    config = run.Config(llm.GPTConfig, num_layers=2, hidden_size=8, num_attention_heads=2)
    return run.Partial(dict, model=run.Config(llm.GPTModel, config=config), each=[run.Config(list)], steps=3)


def test_a_partial_is_changed_built_and_called() -> None:
    task = recipe()
    task.model.config.num_layers = 4
    task.steps = 5
    made = run.run(task, name="trial")
    assert made["model"].config.num_layers == 4 and made["each"] == [[]] and made["steps"] == 5
    assert "GPTModel" in repr(task)
    assert task.model.config.seq_length == 1024 and task.model.optim is None  # defaults
    copied = copy.deepcopy(task)
    copied.model.config.num_layers = 6
    assert task.model.config.num_layers == 4
    with pytest.raises(AttributeError, match=r"GPTConfig has no argument num_layer; did you mean num_layers\?"):
        copied.model.config.num_layer = 6
    run.Config(nl.MegatronStrategy).gradient_as_bucket_view = True  # of a class that takes further keywords
    given = run.Config(nl.MegatronMixedPrecision, "bf16-mixed")
    assert given.precision == given.make().precision == "bf16-mixed" and given.grad_reduce_in_fp32 is True
    with pytest.raises(AttributeError, match="given so far are model, each, steps"):
        print(task.trainer)


def test_what_starts_other_processes_is_refused() -> None:
    with pytest.raises(UserError, match=r"executor=<int>.*torchrun"):
        run.run(recipe(), executor=3)
    with pytest.raises(UserError, match=r"nemo_run.Experiment: not part"):
        print(run.Experiment)
    with pytest.raises(UserError, match=r"plugins=...\): there is no such argument"):
        run.run(recipe(), plugins=[])


def test_names_are_nemos() -> None:
    assert nl.lr_scheduler.CosineAnnealingScheduler and llm.tokenizer.AutoTokenizer
