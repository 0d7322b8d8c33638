"""The first lines of published guides, as they are quoted: groups, config, model, a torch optimizer; then a step.

They are run as torchrun starts them, on two ranks, and with sizes of 1 in a plain process; both get the same losses.
"""

import re
import time
from pathlib import Path

import pytest
from support.launch import launch

QUOTED = """
import torch
from megatron.facades import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
config = TransformerConfig(num_layers=12, hidden_size=768, num_attention_heads=12, use_cpu_initialization=True, pipeline_dtype=torch.float16)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
model = GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=50257, max_sequence_length=1024)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
"""  # noqa: E501

STEPS = """
model.eval()  # dropout's masks would be drawn anew in each run
ids = torch.randint(50257, (1, 17), generator=torch.Generator().manual_seed(0))
for _ in range(3):
    optimizer.zero_grad()
    loss = model(ids[:, :-1], None, None, labels=ids[:, 1:].contiguous()).mean()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.5f}", flush=True)
import torch.distributed as dist
if dist.is_initialized():
    dist.destroy_process_group()
"""

SMALL = QUOTED.replace("num_layers=12, hidden_size=768", "num_layers=2, hidden_size=24")


def _small() -> None:
    exec(SMALL + STEPS)


def _small_alone() -> None:
    exec(SMALL.replace("tensor_model_parallel_size=2", "tensor_model_parallel_size=1") + STEPS)


def _quoted() -> None:
    exec(QUOTED + STEPS)


def losses_of(folder: Path, world_size: int, main, seconds: float = 240.0) -> list[list[float]]:
    program = launch("", world_size, folder, main)
    begun = time.monotonic()
    codes = program.exit_codes(seconds)
    texts = [program.output(rank) for rank in range(max(world_size, 1))]
    assert set(codes) == {0}, (codes, time.monotonic() - begun, texts)
    return [[float(number) for number in re.findall(r"loss (\S+)", text)] for text in texts]


def test_two_ranks_and_a_plain_process(tmp_path):
    (alone,) = losses_of(tmp_path / "alone", 0, _small_alone)
    assert len(alone) == 3 and alone[2] < alone[0]
    for losses in losses_of(tmp_path / "two", 2, _small):
        assert losses == pytest.approx(alone, abs=2e-5)


@pytest.mark.slow
def test_the_quoted_size(tmp_path):
    for losses in losses_of(tmp_path, 2, _quoted, 280.0):
        assert len(losses) == 3 and losses[2] < losses[0] and 10 < losses[0] < 12
