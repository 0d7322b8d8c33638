"""Known bugs of BERT's layers and heads."""

from parity.mutations.mutation import Mutation

BERT = [
    Mutation(
        "token-types-alike-on-ranks",
        "under sequence parallelism every rank adds the token types of the first one's tokens",
        "core/models/common/embeddings/language_model_embedding.py",
        "self.tokentype_embeddings(self._own(tokentype_ids.t()))",
        "self.tokentype_embeddings(tokentype_ids.t()[: len(hidden)])",
        "bert/sp2/default",
    ),
    Mutation(
        "padding-seen-on-one-rank",
        "the second tensor parallel rank does not hide padding from its heads",
        "core/models/bert/bert_model.py",
        "mask = None if attention_mask is None else",
        'mask = None if attention_mask is None or self.pg_collection.rank("tp") == 1 else',
        "bert/tp2/default",
    ),
    Mutation(
        "pooler-summed",
        "under sequence parallelism the pooler's gradient, which every rank has whole, is summed",
        "core/models/bert/pooler.py",
        "init_method=config.init_method, input_is_whole=True",
        "init_method=config.init_method, input_is_whole=False",
        "bert/sp2/default",
    ),
    Mutation(
        "pooler-of-own-tokens",
        "under sequence parallelism every rank pools the first token that it holds",
        "core/models/bert/pooler.py",
        "if self.config.sequence_parallel:",
        "if False:",
        "bert/sp2/default",
    ),
    Mutation(
        "transform-not-summed",
        "the gradient of the transform before the head is left a sum over a rank's own tokens",
        "core/tensor_parallel/replicated.py",
        "by_token = config.sequence_parallel and not input_is_whole",
        "by_token = False",
        "bert/sp2/default",
    ),
]
