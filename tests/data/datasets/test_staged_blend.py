"""megatron/data/datasets/staged_blend.py: samples of stages, with no repetition inside a pass over a dataset."""

import json

import numpy as np
import pytest

from megatron.data.datasets.blend_stages import read_stages_file
from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.data.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.data.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.data.datasets.staged_blend import StagedBlend
from megatron.data.tokenizer.null import NullTokenizer


def write_data(prefix, seed):
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for _ in range(40):
            builder.add_document(random.integers(0, 20_000, 11), [11])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def build(tmp_path, size):
    a, b = (write_data(tmp_path / name, seed) for seed, name in enumerate("ab"))
    stages = [{"from_sample": 0, "data_path": f"3 {a} 1 {b}"}, {"from_sample": 20, "data_path": f"1 {a} 3 {b}"}]
    (tmp_path / "stages.json").write_text(json.dumps(stages))
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        blend=([a, b], [1.0, 3.0]),
        blend_stages=read_stages_file(str(tmp_path / "stages.json")),
        split="90,10,0",
        tokenizer=NullTokenizer(20_000),
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [size, 4, 0], lambda: True, config).build()


def test_no_sample_is_repeated_before_all_others_have_come(tmp_path, caplog):
    train, valid, _ = build(tmp_path, 200)
    assert isinstance(train, StagedBlend) and len(train) == 200 and len(valid) >= 4
    seen = {0: [], 1: []}
    for idx in range(200):
        item = train[idx]
        assert item["sample_id"].item() == idx
        seen[item["dataset_id"]].append(tuple(item["tokens"].tolist()))
    assert len(seen[0]) == 15 + 45 and len(seen[1]) == 5 + 135
    for which, samples in seen.items():
        each = len(train.passes[which][0])
        assert each < len(samples)  # several passes
        for start in range(0, len(samples), each):
            one_pass = samples[start : start + each]
            assert len(set(one_pass)) == len(one_pass)
        assert samples[:each] != samples[each : 2 * each]  # in another order
    assert f"--data-stages: 60 samples of {tmp_path}/a, 2.50 passes over its data" in caplog.text
    with pytest.raises(IndexError, match="sample 200 requested"):
        train[200]


def test_a_longer_run_has_the_same_samples(tmp_path):
    short, long = build(tmp_path, 30)[0], build(tmp_path, 90)[0]
    for idx in range(30):
        assert short[idx]["tokens"].tolist() == long[idx]["tokens"].tolist()
        assert short.document_lengths(idx).tolist() == long.document_lengths(idx).tolist()
        assert long.document_lengths(idx).sum() == 16
