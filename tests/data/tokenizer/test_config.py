"""The vocabulary of the model follows from the tokenizer's flags. tests/training/config has what is impossible."""

from megatron.data.tokenizer.config import TokenizerConfig


def test_the_vocabulary_of_the_model() -> None:
    assert TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10).model_vocab_size(11) == 11
    assert TokenizerConfig(vocab_size=200).model_vocab_size(150) == 200
    assert TokenizerConfig().model_vocab_size(150) == 150 and TokenizerConfig().family == "GPT2BPETokenizer"
