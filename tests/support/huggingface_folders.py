"""Small folders of Hugging Face tokenizers: byte-level BPE of the golden corpus."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

GOLDEN = Path(__file__).parents[1] / "data/golden/corpus"


def byte_level_json(*, pattern=None, normalizer=None, add_prefix_space=False, ignore_merges=False, added=()):
    vocab = json.loads((GOLDEN / "gpt2bpe/vocab.json").read_text())
    merges = [tuple(line.split(" ")) for line in (GOLDEN / "gpt2bpe/merges.txt").read_text().splitlines()[1:]]
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    if pattern is not None:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    made.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    made.add_tokens(list(added))
    return made


def write_folder(folder: Path, made: tokenizers.Tokenizer, **config) -> Path:
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
