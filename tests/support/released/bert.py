"""The calls of pretrain_bert.py."""

from functools import partial
from typing import Any

from support.released.losses import bert_loss
from support.released.program import MASKING, Program


class Bert(Program):
    """pretrain_bert.py."""

    script = "pretrain_bert"

    def build_model(self, vp_stage: Any = None, config: Any = None, pg_collection: Any = None, **ends: bool) -> Any:
        facts, args = self.facts, self.args
        facts.call("print_rank_0", f"pretrain_bert of {self.release} builds its model")
        config = self.config_of(facts, config)
        values = {
            "num_tokentypes": 2 if args.bert_binary_head else 0,
            "add_binary_head": args.bert_binary_head,
            "parallel_output": True,
            **ends,
        }
        facts.refused("model.BertModel", config=config, **values)
        assert self.core_models()
        te, local = facts["bert_layer_with_transformer_engine_spec"], facts["bert_layer_local_spec"]
        import_module, spec = facts["import_module"], args.spec
        return facts.fill(
            "bert_model.BertModel",
            config=config,
            transformer_layer_spec=te if spec is None else local if spec == ["local"] else import_module(spec),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            vp_stage=vp_stage,
            **values,
        )

    def dataset(self, values: dict[str, Any]) -> tuple[Any, Any]:
        facts, head = self.facts, self.args.bert_binary_head
        of_bert = {"masking_max_ngram": 3, "masking_use_geometric_distribution": False, "classification_head": head}
        config = facts.fill("BERTMaskedWordPieceDatasetConfig", **MASKING, **of_bert, **values)
        return facts["BERTMaskedWordPieceDataset"], config

    def batch(self, iterator: Any) -> list[Any]:
        """Returns tokens, types, the padding mask, labels, the loss mask and whether segments are swapped."""
        got = self.broadcast(iterator, "text types labels is_random loss_mask padding_mask")
        return [got[name] for name in ("text", "types", "padding_mask", "labels", "loss_mask", "is_random")]

    def forward_step(self, data_iterator: Any, model: Any) -> Any:
        tokens, types, padding, labels, loss_mask, swapped = self.timed_batch(data_iterator)
        given = {"tokentype_ids": types if self.args.bert_binary_head else None, "lm_labels": labels}
        output = self.facts.through(model, "GPTModel.__call__", tokens, padding, **given)
        return output, partial(bert_loss, self.facts, loss_mask, swapped)
