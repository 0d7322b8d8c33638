"""The calls of pretrain_gpt.py, and of gpt_builders.py and model_provider.py from release 0.15 on."""

import contextlib
import importlib
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from support.released.conventions import taking
from support.released.facts import Facts
from support.released.losses import LOSSES
from support.released.program import PROGRAM_START, Program


class Gpt(Program):
    """pretrain_gpt.py. `own_builders`: the model comes from the modules gpt_builders and model_provider of this
    repository, as in a copy of pretrain_gpt.py alone."""

    script, tokenizer_type = "pretrain_gpt", "GPT2BPETokenizer"

    def __init__(self, release: str, own_builders: bool = False) -> None:
        super().__init__(release)
        self.own_builders, split = own_builders, self.conventions.builder
        self.of_builder = Facts("gpt_builders", release) if split else self.facts
        self.of_provider = Facts("model_provider", release) if split else self.facts
        if split:
            self.of_provider["MambaModel"], self.of_provider["core.models.gpt.GPTModel"]
            self.of_provider["legacy.model.GPTModel"], self.of_provider["legacy.model"]
            self.of_builder["legacy.model"], self.facts["models.gpt.GPTModel"]
        if "StragglerDetector" in self.facts:
            self.detector = self.facts.call("StragglerDetector")
            self.facts.use("StragglerDetector.__enter__")
            self.facts.use("StragglerDetector.__exit__")

    def unused(self) -> list[str]:
        if self.own_builders:
            return self.facts.unused()
        return [line for facts in {self.facts, self.of_builder, self.of_provider} for line in facts.unused()]

    def keywords(self) -> dict[str, Any]:
        given = super().keywords()
        if self.conventions.virtual_models:
            given["extra_args_provider"] = None  # its package is not here
        if "set_startup_timestamps" in self.facts:
            self.facts.call("set_startup_timestamps", program_start=PROGRAM_START, main_entry=time.time())
        return given

    def rank_functions(self) -> dict[str, Any]:
        return {"get_embedding_ranks": self.embedding_ranks} if self.conventions.given_config else {}

    def embedding_ranks(self, pp_ranks: list[int]) -> list[int]:
        """Returns the ranks of a pipeline that hold the embedding: the first; the last, if it shares the weights; those
        with multi-token prediction."""
        config = self.config_of(self.facts)
        ranks = {pp_ranks[0], *self.facts.call("get_mtp_ranks", pp_ranks, config)}
        return sorted(ranks if self.args.untie_embeddings_and_output_weights else ranks | {pp_ranks[-1]})

    # Model

    def model_provider(self) -> Any:
        if not self.own_builders:
            return taking(self.build_model, *self.model_parameters())
        builder = importlib.import_module("gpt_builders").gpt_builder
        return partial(importlib.import_module("model_provider").model_provider, builder)

    def build_model(self, vp_stage: Any = None, config: Any = None, pg_collection: Any = None, **ends: bool) -> Any:
        facts, provider = self.of_builder, self.of_provider
        provider.call("print_rank_0", f"pretrain_gpt of {self.release} builds its model")
        facts.call("print_rank_0", "its layers")
        for flag in ("record_memory_history", "fp8_param_gather"):
            if f"args.{flag}" in provider:
                assert not getattr(provider.args, flag), "a GPU's affair"
        config = self.config_of(facts, config)
        if "core_transformer_config_from_yaml" in facts:
            from_yaml = facts["core_transformer_config_from_yaml"]
            config = from_yaml(facts.call("get_args"), "language_model") if facts.args.yaml_cfg else config
        assert self.core_models(facts)
        facts.refused("model.GPTModel", config, num_tokentypes=0, parallel_output=True, **ends)
        layers = self.layers(config, vp_stage)
        values = {
            "config": config,
            "transformer_layer_spec": layers,
            "share_embeddings_and_output_weights": not facts.args.untie_embeddings_and_output_weights,
            "vp_stage": vp_stage,
            "pg_collection": pg_collection,
            "parallel_output": True,
            **ends,
        }
        if "get_gpt_mtp_block_spec" in facts:
            values["mtp_block_spec"] = self.prediction(config, layers, vp_stage)
        return facts.fill("models.gpt.GPTModel", **values)

    def layers(self, config: Any, vp_stage: int | None) -> Any:
        """Returns the specs of the layers. Makes the calls for all kinds of layers, and chooses one."""
        facts = self.of_builder
        args, with_te = facts.args, {"use_transformer_engine": self.with_te(), "vp_stage": vp_stage}
        layer, import_module = self.layer(config), facts["import_module"]
        found = layer
        if "get_gpt_decoder_block_spec" in facts:
            block = facts.fill("get_gpt_decoder_block_spec", config, **with_te)
            found = block if args.num_experts else layer
        if "get_gpt_heterogeneous_layer_spec" in facts:
            assert args.heterogeneous_layers_config_path is None
            facts.refused("get_gpt_heterogeneous_layer_spec", config, self.with_te())
        if "get_gpt_layer_with_inference_spec" in facts:
            assert facts.read(config, "TransformerConfig.transformer_impl") != "inference_optimized"
            facts.refused("get_gpt_layer_with_inference_spec", args.qk_layernorm, args.multi_latent_attention)
            variant = "get_transformer_block_with_experimental_attention_variant_spec"
            other = facts.call(variant, config=config, vp_stage=vp_stage)
            found = other if args.experimental_attention_variant else found
        return import_module(args.spec) if args.spec is not None else found

    def with_te(self) -> bool:
        """Whether layers are those of Transformer Engine; release 0.5 has no others."""
        facts = self.of_builder
        return "args.transformer_impl" not in facts or facts.args.transformer_impl == "transformer_engine"

    def layer(self, config: Any) -> Any:
        """Returns the spec of a layer."""
        facts = self.of_builder
        kitchen = [name for name in facts.names() if name.startswith("megatron.core.transformer.transformer_config")]
        values = {name.rpartition(".")[2]: facts.read(config, name) for name in kitchen if "kitchen" in name}
        # Two releases give another value where the parameter fp8 is.
        fifth = "moe_use_legacy_grouped_gemm" if self.release == "0.11" else "experimental_attention_variant"
        fourth = "fp8" if self.release == "0.9" else "multi_latent_attention"
        order = ["num_experts", "moe_grouped_gemm", "qk_layernorm", fourth, fifth]
        both = [
            facts.fill(name, order=order, **values)
            for name in ("get_gpt_layer_with_transformer_engine_spec", "get_gpt_layer_local_spec")
            if name in facts
        ]
        return both[0 if self.with_te() else -1]

    def prediction(self, config: Any, layers: Any, vp_stage: int | None) -> Any:
        """Returns the specs of the layers of multi-token prediction, or None."""
        facts = self.of_builder
        given = {"use_transformer_engine": self.with_te(), "vp_stage": vp_stage}
        specs = getattr(layers, facts.last("TransformerBlockSubmodules.layer_specs"), [layers])
        last = specs[-1] if specs else self.layer(config)
        if "get_gpt_decoder_layer_specs" in facts:
            last = facts.fill("get_gpt_decoder_layer_specs", config, **given)[-1]
        block = facts.fill("get_gpt_mtp_block_spec", config, last, **given)
        return block if facts.args.mtp_num_layers else None

    # Data

    def dataset_values(self) -> dict[str, Any]:
        facts, args, values = self.facts, self.args, super().dataset_values()
        if self.release == "0.5":
            values["vocab_size"] = values["tokenizer"].vocab_size
        if "args.per_dataset_sequences_path" in facts:
            path = args.per_dataset_sequences_path
            values["sequences_per_dataset"] = json.loads(Path(path).read_text()) if path else None
            values["sequence_parallel_size"] = args.tensor_model_parallel_size * args.sequence_parallel
        return values

    def dataset(self, values: dict[str, Any]) -> tuple[Any, Any]:
        facts, args = self.facts, self.args
        config, kinds = facts.fill("GPTDatasetConfig", **values), {}
        if "SFTDataset" in facts:
            kinds[args.sft] = facts["SFTDataset"]
        mock = facts.read(config, "GPTDatasetConfig.mock") if "GPTDatasetConfig.mock" in facts else args.mock_data
        kinds.setdefault(mock, facts["MockGPTDataset"])
        if "GPTFIMDataset" in facts:
            names = ("prefix", "middle", "suffix", "pad", "eod")
            tokens = {name: getattr(args, f"fim_{name}_token") for name in names}
            fim = facts.fill("GPTFIMDatasetConfig", fim_extra_tokens=tokens, **values)
            config = fim if args.fim_data else config
            kinds.setdefault(args.fim_data, facts["GPTFIMDataset"])
        kinds.setdefault(True, facts["GPTDataset"])
        return kinds[True], config

    def at_an_end(self, vp_stage: int | None) -> bool:
        """Whether this rank has the first or the last stage."""
        if "is_first_or_last_pipeline_stage" in self.facts:
            return self.facts.call("is_first_or_last_pipeline_stage", vp_stage)
        first, last = (self.facts.call(f"is_pipeline_{end}_stage") for end in ("first", "last"))
        return first or last

    def holds_data(self, vp_stage: int | None) -> bool:
        return self.at_an_end(vp_stage) and super().holds_data(vp_stage)

    def batch(self, iterator: Any, vp_stage: int | None) -> list[Any]:
        """Returns tokens, labels, loss mask, attention mask, positions, and the record of packed samples."""
        facts, predicts = self.facts, {}
        if "mtp_on_this_rank" in facts:
            predicts["mtp_on_this_rank"] = facts.call(
                "mtp_on_this_rank", self.config_of(facts), ignore_virtual=False, vp_stage=vp_stage
            )
        if not self.at_an_end(vp_stage) and not any(predicts.values()):
            return [None] * 6
        whole = facts.call("get_batch_on_this_tp_rank", iterator, **predicts)
        if not predicts:
            return [*facts.call("get_batch_on_this_cp_rank", whole).values(), None]
        documents, longest, context = (whole.pop(name) for name in ("cu_seqlens", "max_seqlen", "local_cp_size"))
        packed, hybrid = facts["get_thd_batch_on_this_cp_rank"], facts["get_batch_on_this_hybrid_cp_rank"]
        if context is not None:
            part, record = hybrid(whole, context)
        elif documents is not None:
            part, record = packed(whole, documents, None, longest)
        else:
            part, record = facts.call("get_batch_on_this_cp_rank", whole), None
        return [*part.values(), record]

    # Step

    def step(self) -> Any:
        plan = ["return_schedule_plan"] * self.conventions.virtual_models
        return taking(self.forward_step, "data_iterator", "model", *plan)

    def forward_step(self, data_iterator: Any, model: Any, return_schedule_plan: bool | None = None) -> Any:
        facts, stage = self.facts, None
        assert not return_schedule_plan
        if "get_attr_wrapped_model" in facts:
            stage = facts.call("get_attr_wrapped_model", model, facts.last("GPTModel.vp_stage"))
        has_detector = "StragglerDetector" in facts
        nothing = contextlib.nullcontext()
        with facts.through(self.detector, "StragglerDetector.__call__", bdata=True) if has_detector else nothing:
            tokens, labels, loss_mask, mask, positions, packed = self.timed_batch(data_iterator, stage)
        given = {"labels": labels}
        if self.conventions.virtual_models:
            assert not self.args.use_legacy_models
            given["loss_mask"] = loss_mask
        if self.conventions.given_config:
            given["packed_seq_params"] = packed
        with self.detector if has_detector else nothing:
            output = facts.through(model, "GPTModel.__call__", tokens, positions, mask, **given)
        of_model = {"model": model} if self.conventions.virtual_models else {}
        return output, partial(self.loss(), loss_mask, **of_model)

    def loss(self) -> Any:
        """Returns the loss function, of (loss mask, losses)."""
        return partial(LOSSES[self.conventions.loss], self.facts, self.conventions.scales_by_context)
