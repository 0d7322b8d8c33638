"""Small token files, Megatron-LM's golden data, and warnings that are said once in a process told anew in each test."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.core.utils import warn
from megatron.data.datasets.indexed_dataset import IndexedDatasetBuilder

GOLDEN = Path(__file__).parents[2] / "data" / "golden"


@pytest.fixture(autouse=True)
def tell_warnings_anew():
    warn._warn_once.cache_clear()


@pytest.fixture(scope="session")
def golden():
    return GOLDEN


@pytest.fixture(scope="session")
def tokenizer():
    return SimpleNamespace(vocab_size=600, eod=0, unique_identifiers={"name": "bpe600"})


@pytest.fixture
def write_documents():
    """Write documents (lists of token lists, one a sequence, or flat token lists) under a prefix."""

    def write(prefix, documents, dtype=np.uint16):
        with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
            for document in documents:
                sequences = document if document and isinstance(document[0], list) else [document] if document else []
                builder.add_document(np.array(list(itertools.chain(*sequences)), np.int64), [len(s) for s in sequences])
            builder.finalize(f"{prefix}.idx")
        return str(prefix)

    return write


@pytest.fixture(scope="session")
def blend_prefixes(tmp_path_factory):
    """Folder with the corpus' text, title and body, encoded by the tokenizers library and written by the builder."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("pp")
    bpe = GOLDEN / "corpus" / "gpt2bpe"
    encoder = ByteLevelBPETokenizer(str(bpe / "vocab.json"), str(bpe / "merges.txt"))
    lines = [json.loads(line) for line in (GOLDEN / "corpus" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    for key in ("text", "title", "body"):
        prefix = folder / f"gpt2_eod_{key}_document"
        with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
            for line in lines:
                texts = line[key] if isinstance(line[key], list) else [line[key]]
                sequences = [ids for ids in (encoder.encode(text).ids for text in texts) if ids]
                if sequences:
                    sequences[-1] = [*sequences[-1], 0]
                builder.add_document(list(itertools.chain(*sequences)), [len(ids) for ids in sequences])
            builder.finalize(f"{prefix}.idx")
    return folder
