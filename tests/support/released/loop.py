"""The calls of run_simple_mcore_train_loop.py: a loop over megatron.core alone, which saves and loads a checkpoint."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.released.facts import Facts
from torch import Tensor
from torch.utils.data import DataLoader

from megatron.core.utils.rendezvous import local_device, start_torch_distributed

LENGTH, ROWS, STEPS = 16, 4, 2


class Loop:
    """The loop of a release."""

    def __init__(self, release: str) -> None:
        self.facts, self.release = Facts("run_simple_mcore_train_loop", release), release
        self.wrapped = "DistributedDataParallel" in self.facts

    def unused(self) -> list[str]:
        """Returns the facts that this run has not used."""
        return self.facts.unused()

    def start(self) -> None:
        """Trains, saves and loads in the current folder, and prints the losses and `loaded`."""
        facts, device = self.facts, local_device()
        start_torch_distributed(device, alone=True)
        facts["core.parallel_state"], facts["core.dist_checkpointing"]
        facts.call("destroy_model_parallel")
        facts.call("initialize_model_parallel", dist.get_world_size(), 1)
        facts.call("model_parallel_cuda_manual_seed", 123)
        model, data = self.model().to(device), self.data()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        run = facts.call("get_forward_backward_func")
        for _ in range(STEPS):
            optimizer.zero_grad()
            if self.wrapped:
                model.zero_grad_buffer()
            (report,) = facts.through(
                run,
                "forward_backward_func",
                forward_step_func=self.forward_step,
                data_iterator=data,
                model=model,
                num_microbatches=1,
                seq_length=LENGTH,
                micro_batch_size=ROWS,
                decoder_seq_length=LENGTH,
                forward_only=False,
            )
            if self.wrapped:
                facts.call("finalize_model_grads.finalize_model_grads", [model])
                for parameter in model.parameters():
                    parameter.grad = parameter.main_grad
            optimizer.step()
            print(f"lm loss: {float(report['lm loss'])}", flush=True)
        self.save_and_load(model)
        facts.call("destroy_model_parallel")

    def model(self) -> Any:
        """Returns a small GPT."""
        facts = self.facts
        config = facts.call(
            "TransformerConfig",
            num_layers=2,
            hidden_size=16,
            num_attention_heads=4,
            use_cpu_initialization=True,
            pipeline_dtype=torch.float32,
        )
        config.hidden_dropout = config.attention_dropout = 0.0  # masks of a model outside a run depend on the layout
        model = facts.call(
            "gpt_model.GPTModel",
            config=config,
            transformer_layer_spec=facts.call("get_gpt_layer_local_spec"),
            vocab_size=64,
            max_sequence_length=LENGTH,
        )
        if not self.wrapped:
            return model
        settings = dict.fromkeys(["grad_reduce_in_fp32", "overlap_grad_reduce", "use_distributed_optimizer"], False)
        ddp = facts.call("DistributedDataParallelConfig", **settings)
        config = facts.read(model, "GPTModel.config")
        return facts.call("distributed.DistributedDataParallel", config=config, ddp_config=ddp, module=model)

    def data(self) -> Any:
        """Returns micro-batches of made-up text."""
        facts = self.facts
        facts.call("compile_helpers")
        flags = dict.fromkeys(["reset_position_ids", "reset_attention_mask", "eod_mask_loss"], False)
        config = facts.fill(
            "GPTDatasetConfig",
            random_seed=0,
            sequence_length=LENGTH,
            tokenizer=facts.call("_NullTokenizer", vocab_size=LENGTH),
            mid_level_dataset_surplus=0.005,
            **flags,
        )
        builder = facts.call(
            "BlendedMegatronDatasetBuilder", facts["MockGPTDataset"], [100, None, None], lambda: True, config
        )
        train, *_ = facts.through(builder.build, "BlendedMegatronDatasetBuilder.build")
        return iter(DataLoader(train, batch_size=ROWS))

    def forward_step(self, iterator: Any, model: Any) -> tuple[Tensor, Any]:
        batch = {name: value.to(local_device()) for name, value in next(iterator).items()}
        words = [batch[name] for name in ("tokens", "position_ids", "attention_mask")]
        losses = self.facts.through(model, "GPTModel.__call__", *words, labels=batch["labels"])
        return losses, partial(self.loss, batch["loss_mask"].float())

    def loss(self, loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = (losses * loss_mask).sum() / loss_mask.sum()
        return mean, {"lm loss": mean.detach()}

    def save_and_load(self, model: Any) -> None:
        """Saves the weights, changes them and loads them."""
        facts, folder = self.facts, Path(f"checkpoint-{self.release}")
        if self.wrapped:
            model = facts.read(model, "DistributedDataParallel.module")
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        before = {name: value.clone() for name, value in model.named_parameters()}
        where = {"checkpoint_dir": str(folder)}
        facts.call("dist_checkpointing.save", sharded_state_dict=self.sharded(model), **where)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        loaded = facts.call("dist_checkpointing.load", sharded_state_dict=self.sharded(model), **where)
        facts.through(model.load_state_dict, "GPTModel.load_state_dict", loaded)
        assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
        print("loaded", flush=True)

    def sharded(self, model: Any) -> Any:
        return self.facts.through(model.sharded_state_dict, "GPTModel.sharded_state_dict", prefix="")
