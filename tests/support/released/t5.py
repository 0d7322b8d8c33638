"""The calls of pretrain_t5.py."""

import copy
from functools import partial
from typing import Any

from support.released.facts import RELEASES
from support.released.gpt import Gpt
from support.released.losses import LOSSES
from support.released.program import MASKING, Program
from torch import Tensor


class T5(Program):
    """pretrain_t5.py. From release 0.9 on its loss is that of pretrain_gpt.py."""

    script, timer = "pretrain_t5", "batch generator"

    def __init__(self, release: str) -> None:
        super().__init__(release)
        self.shared_loss = RELEASES.index(release) >= RELEASES.index("0.9")
        self.loss = (
            Gpt(release).loss() if self.shared_loss else partial(LOSSES[self.conventions.loss], self.facts, False)
        )

    def model_type(self) -> Any:
        two = "ModelType.encoder_and_decoder"
        return self.facts[two] if two in self.facts else super().model_type()

    def model_parameters(self) -> list[str]:
        names = ["pre_process", "post_process", "add_encoder", "add_decoder"]
        return names + ["config", "pg_collection"] * self.conventions.given_config

    def rank_functions(self) -> dict[str, Any]:
        if not self.shared_loss:
            return {}
        return {"get_embedding_ranks": self.embedding_ranks, "get_position_embedding_ranks": self.position_ranks}

    def position_ranks(self, pp_ranks: list[int]) -> list[int]:
        """Returns the ranks of a pipeline with the first stage of encoder and decoder."""
        apart = "args.encoder_pipeline_model_parallel_size" in self.facts
        return sorted({pp_ranks[0], pp_ranks[self.args.encoder_pipeline_model_parallel_size if apart else 0]})

    def embedding_ranks(self, pp_ranks: list[int]) -> list[int]:
        return sorted({*self.position_ranks(pp_ranks), pp_ranks[-1]})

    def layer_counts(self, config: Any) -> tuple[Any, int, int]:
        """Returns the config of the encoder, and how many layers encoder and decoder have on a stage."""
        facts, args = self.facts, self.args
        if "TransformerConfig.num_layers" not in facts:
            return config, args.encoder_num_layers, args.decoder_num_layers
        encoder, stages_of_encoder = copy.deepcopy(config), 0
        encoder.num_layers = args.encoder_num_layers
        if "args.encoder_tensor_model_parallel_size" in facts:
            same = {args.tensor_model_parallel_size, args.encoder_tensor_model_parallel_size} - {0}
            assert len(same) == 1
            stages_of_encoder = args.encoder_pipeline_model_parallel_size
        if args.pipeline_model_parallel_size > 1:
            assert stages_of_encoder, "one stage, or stages of the encoder"
            encoder.pipeline_model_parallel_size = stages_of_encoder
        layers, stages = "TransformerConfig.num_layers", "TransformerConfig.pipeline_model_parallel_size"
        counts = [facts.read(one, layers) // facts.read(one, stages) for one in (encoder, config)]
        return encoder, *counts

    def build_model(self, config: Any = None, pg_collection: Any = None, **stage: Any) -> Any:
        facts, args = self.facts, self.args
        facts.call("print_rank_0", f"pretrain_t5 of {self.release} builds its model")
        config = self.config_of(facts, config)
        if "megatron" in facts:
            facts["megatron"].legacy.model.T5Model  # noqa: B018  (reached as an attribute)
        facts.refused("model.T5Model", config=config, num_tokentypes=0, parallel_output=True, **stage)
        assert self.core_models()
        encoder, *counts = self.layer_counts(config)
        kind = "transformer_engine" if args.transformer_impl == "transformer_engine" else "local"
        specs = {
            (part, other): facts.call(f"get_t5_{part}_with_{other}_block_spec", count)
            for part, count in zip(("encoder", "decoder"), counts, strict=True)
            for other in ("transformer_engine", "local")
        }
        return facts.fill(
            "T5.T5Model",
            config=config,
            encoder_config=encoder,
            transformer_encoder_layer_spec=specs["encoder", kind],
            transformer_decoder_layer_spec=specs["decoder", kind],
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            parallel_output=True,
            **stage,
        )

    def dataset(self, values: dict[str, Any]) -> tuple[Any, Any]:
        of_t5 = {"masking_max_ngram": 10, "masking_use_geometric_distribution": True}
        of_t5["sequence_length"] = self.args.encoder_seq_length
        config = self.facts.fill("T5MaskedWordPieceDatasetConfig", **MASKING, **of_t5, **values)
        return self.facts["T5MaskedWordPieceDataset"], config

    def batch(self, iterator: Any) -> tuple[dict[str, Tensor], list[Any]]:
        """Returns the tensors by name, and the masks of encoder, decoder and cross attention: True where masked."""
        names, make = "text_enc text_dec labels loss_mask enc_mask dec_mask", "config_attention_mask"
        given = make not in self.facts
        got = self.broadcast(iterator, f"{names} enc_dec_mask" if given else names)
        masks = [got[name] < 0.5 for name in ("enc_mask", "dec_mask", "enc_dec_mask") if name in got]
        if given:
            return got, masks
        local = self.args.transformer_impl != "transformer_engine"
        return got, [*self.facts.call(make, got["text_enc"], got["text_dec"], *masks, local)]

    def forward_step(self, data_iterator: Any, model: Any) -> Any:
        got, masks = self.timed_batch(data_iterator)
        words = (got["text_enc"], got["text_dec"], *masks)
        output = self.facts.through(model, "GPTModel.__call__", *words, lm_labels=got["labels"])
        return output, partial(self.loss, got["loss_mask"])
