"""megatron/facades/plugin_arguments.py: what Accelerate's plugin writes, in our terms."""

import sys

import pytest

from megatron.core.exceptions import UserError
from megatron.core.transformer.enums import AttnBackend
from megatron.facades.arguments import Arguments, parse_args, validate_args
from megatron.facades.plugin_arguments import is_of_plugin

WRITTEN = {
    "model_type_name": "gpt",
    "megatron_dataset_flag": False,
    "num_micro_batches": 1,
    "orig_vocab_size": 60,
    "tokenizer_type": "GPT2BPETokenizer",
    "attention_backend": True,
    "use_rotary_position_embeddings": True,
    "calculate_per_token_loss": True,
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "micro_batch_size": 2,
}


def written(monkeypatch: pytest.MonkeyPatch, **values: object) -> Arguments:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    args = parse_args(None, ignore_unknown_args=True)
    for name, value in {**WRITTEN, **values}.items():
        setattr(args, name, value)
    return args


def test_values_become_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    args = written(monkeypatch)
    assert is_of_plugin(args) and not is_of_plugin(parse_args())
    config = validate_args(args).config
    assert config is not None and config.transformer.attention_backend == AttnBackend.auto
    assert config.model.position_embedding_type == "rope"
    assert not config.transformer.calculate_per_token_loss
    assert capsys.readouterr().out.startswith("MegatronLMPlugin: calculate_per_token_loss: has no effect")
    assert (config.tokenizer.tokenizer_type, config.tokenizer.vocab_size) == ("NullTokenizer", 59)
    off = validate_args(written(monkeypatch, attention_backend=False, use_rotary_position_embeddings=False)).config
    assert off is not None and off.transformer.attention_backend == AttnBackend.unfused
    assert off.model.position_embedding_type == "learned_absolute"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type_name": "bert"}, "a model of type bert is not here"),
        ({"use_custom_fsdp": True}, "use_custom_fsdp: not yet; use_distributed_optimizer shards"),
        ({"return_logits": True}, "return_logits: not yet"),
        ({"no_wd_decay_cond": print}, "no_wd_decay_cond: not yet"),
        ({"lr_mult": 2.0}, "lr_mult: not yet; multiply the learning rate"),
        ({"pipeline_model_parallel_split_rank": 1}, "pipeline_model_parallel_split_rank: not yet"),
    ],
)
def test_values_without_a_counterpart(monkeypatch: pytest.MonkeyPatch, values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"MegatronLMPlugin: .*{message}"):
        validate_args(written(monkeypatch, **values))
