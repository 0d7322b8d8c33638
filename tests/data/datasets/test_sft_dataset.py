"""megatron/data/datasets/sft_dataset.py: conversations packed into samples, each learned and seen on its own."""

import itertools
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.data.datasets.conversations import parse_conversation
from megatron.data.datasets.gpt_dataset import GPTDatasetConfig
from megatron.data.datasets.sft_dataset import SFTConversations, SFTDataset
from megatron.data.datasets.utils import Split
from megatron.training.data.batch import collate_gpt


class Words:
    """A content is ids; those of the assistant are learned."""

    eod, pad, unique_identifiers = 0, None, {"words": 1}

    def encode_conversation(self, messages):
        turns = [([int(word) for word in turn["content"].split()], turn["role"] == "assistant") for turn in messages]
        ids = [index for words, _ in turns for index in words]
        learned = [learns for words, learns in turns for _ in words]
        if not any(learned):
            raise UserError("no turn to learn from")
        return ids, learned


def write(path, sizes):
    """Conversation k: a question 100k+1 ... and an answer of as many tokens."""
    with path.open("w") as file:
        for k, size in enumerate(sizes):
            ids = [str(100 * k + 1 + i) for i in range(2 * size)]
            turns = [{"role": "user", "content": " ".join(ids[:size])}]
            turns.append({"role": "assistant", "content": " ".join(ids[size:])})
            file.write(json.dumps({"messages": turns}) + "\n\n")
    return str(path)


@pytest.fixture
def build(tmp_path):
    def build_dataset(sizes, length=16, num_samples=None, seed=1):
        path = write(tmp_path / "talks.jsonl", sizes)
        config = GPTDatasetConfig(seed, length, blend=([path], None), split="1,0,0", tokenizer=Words())
        conversations = SFTConversations(path, Words())
        return SFTDataset(conversations, path, range(len(sizes)), num_samples, Split.train, config)

    return build_dataset


def talks_of(item):
    """The conversations of an item: numbers, with a check of everything that belongs to each."""
    bounds = np.unique(item["cu_seqlens"].numpy())
    found = []
    for begin, end in itertools.pairwise(bounds):
        tokens, labels, mask = (item[name][begin:end].numpy() for name in ("tokens", "labels", "loss_mask"))
        assert item["position_ids"][begin:end].tolist() == list(range(end - begin))
        if tokens[0] == 0:
            assert not mask.any() and not tokens.any()
            continue
        number, size = divmod(int(tokens[0]), 100)[0], (end - begin + 1) // 2
        assert labels.tolist() == [index + 1 for index in tokens.tolist()]
        assert mask.tolist() == [float(index > 100 * number + size) for index in labels.tolist()]
        found.append(number)
    assert item["max_seqlen"] == np.diff(bounds).max()
    return found


def test_every_conversation_once_in_an_epoch(build):
    sizes = [2, 3, 4, 5, 1, 2, 3, 4, 8, 1]
    dataset = build(sizes)
    samples = [talks_of(dataset[i]) for i in range(len(dataset))]
    assert sorted(number for talks in samples for number in talks) == list(range(10))
    for i in range(len(dataset)):
        lengths = dataset.document_lengths(i)
        assert lengths[lengths > 0].tolist() == np.diff(np.unique(dataset[i]["cu_seqlens"].numpy())).tolist()
    room = [sum(2 * sizes[number] - 1 for number in talks) for talks in samples]
    assert max(room) <= 16
    for talks, used in zip(samples[1:], room, strict=False):  # the next one did not fit
        assert used + 2 * sizes[talks[0]] - 1 > 16
    assert [item["sample_id"].item() for item in map(dataset.__getitem__, range(3))] == [0, 1, 2]
    copy = pickle.loads(pickle.dumps(dataset))
    assert all(np.array_equal(copy[1][name], dataset[1][name]) for name in dataset[1])


def test_epochs_differ_and_the_seed_decides(build):
    sizes = [3] * 12
    dataset = build(sizes, num_samples=11)
    assert len(dataset) >= 11
    talks = [number for i in range(len(dataset)) for number in talks_of(dataset[i])]
    first, second = talks[:12], talks[12:24]
    assert sorted(first) == sorted(second) == list(range(12)) and first != second
    again = build(sizes, num_samples=3)
    assert [talks_of(again[i]) for i in range(3)] == [talks_of(dataset[i]) for i in range(3)]
    other = build(sizes, num_samples=3, seed=2)
    assert [talks_of(other[i]) for i in range(3)] != [talks_of(dataset[i]) for i in range(3)]


def test_long_conversations_are_cut_and_told(build, caplog):
    dataset = build([20, 2], length=32)
    assert "1 of 2 conversations are longer than --seq-length 32 and are cut" in caplog.text
    items = [dataset[i] for i in range(2)]
    (long,) = [item for item in items if item["tokens"][0] == 1]
    assert long["labels"].tolist() == list(range(2, 34)) and long["loss_mask"].sum() == 13


def test_an_item_that_fills_up_a_batch_has_no_loss(build):
    item = build([2, 2])[None]
    assert item["loss_mask"].sum() == 0 and item["sample_id"] == -1


def test_the_builder_divides_conversations(tmp_path):
    path = write(tmp_path / "talks.jsonl", [2] * 20)
    config = GPTDatasetConfig(1, 16, blend=([path], None), split="80,10,10", tokenizer=Words())
    splits = BlendedMegatronDatasetBuilder(SFTDataset, [None, None, None], lambda: True, config).build()
    assert [[talks_of(split[i]) for i in range(len(split))] != [] for split in splits] == [True] * 3
    assert len(splits[0].indices) == 16 and len(splits[1].indices) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "talks.jsonl:2: not JSON"),
        ('{"text": "a"}', 'talks.jsonl:2: expected {"messages"'),
        ('{"messages": []}', 'talks.jsonl:2: expected {"messages"'),
        ('[{"role": "user"}]', 'talks.jsonl:2: each turn needs a "role" and a "content"'),
        ('[{"role": "user", "content": "1"}]', "talks.jsonl:2: no turn to learn from"),
        ('[{"role": "user", "content": 1}]', 'talks.jsonl:2: turn 1: "content" is a number; expected a text'),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, line, says):
    path = tmp_path / "talks.jsonl"
    path.write_text('[{"role": "assistant", "content": "1 2"}]\n' + line + "\n")
    with pytest.raises(UserError) as error:
        SFTConversations(str(path), Words())
    assert says in str(error.value)


class WordsWithTools(Words):
    """Adds an id that a field of the line gives."""

    def encode_conversation(self, messages, fields):
        ids, learned = super().encode_conversation(messages)
        return [*ids, fields.get("extra", 0)], [*learned, True]

    def unread_fields(self, messages, fields):
        return set(fields) - {"extra"}


def test_other_fields_of_a_line_reach_the_tokenizer_or_are_named(tmp_path, caplog):
    path = tmp_path / "fields.jsonl"
    row = {"messages": [{"role": "assistant", "content": "1 2"}]}
    path.write_text("".join(json.dumps(row | more) + "\n" for more in ({"extra": 7, "id": 1}, {"id": 2}, {})))
    assert [ids.tolist() for ids in SFTConversations(str(path), WordsWithTools()).ids] == [
        [1, 2, 7],
        [1, 2, 0],
        [1, 2, 0],
    ]
    assert "does not read these fields, in so many lines: id (2)" in caplog.text
    caplog.clear()
    SFTConversations(str(path), Words())  # of a script, without fields
    assert "extra (1), id (2)" in caplog.text


def test_conversations_of_which_nothing_is_learned_are_told(build, caplog):
    build([20, 2], length=8)
    assert "nothing is learned from 1 of 2 conversations" in caplog.text
    with pytest.raises(UserError, match=r"nothing is learned from 2 of 2 .* \(--seq-length 8\); give a larger"):
        build([20, 30], length=8)


def test_files_and_tokenizers(tmp_path):
    with pytest.raises(UserError, match="none: No such file or directory; --sft reads"):
        SFTConversations(str(tmp_path / "none"), Words())
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UserError, match="contains no conversations"):
        SFTConversations(str(tmp_path / "empty"), Words())
    with pytest.raises(UserError, match="only --tokenizer-type SFTTokenizer encodes"):
        SFTConversations(str(tmp_path / "empty"), SimpleNamespace())


def test_turns_without_a_text(tmp_path):
    part, calls = {"type": "text", "text": "1"}, [{"function": {"name": "f"}}]
    turns = [
        {"role": "user", "content": [part, part]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": {"value": 1}},
        {"role": "assistant", "tool_calls": calls},
        {"role": "assistant", "content": None, "reasoning_content": "1"},
    ]
    line = json.dumps({"messages": turns, "tools": None}).encode()
    assert parse_conversation(line) == (turns, {"tools": None})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('[{"role": 1, "content": "1"}]', 'each turn needs a "role" and a "content"'),
        ('[{"role": "user", "content": 1}]', 'turn 1: "content" is a number; expected a text'),
        ('[{"role": "user", "content": true}]', '"content" is a boolean; expected a text'),
        ('[{"role": "user", "content": {}}]', '"content" is an object; expected a text'),
        ('[{"role": "user", "content": [{"type": "image"}]}]', "a part that is not"),
        ('[{"role": "user", "content": ["a"]}]', "a part that is not"),
        ('[{"role": "user", "content": [{"type": "text", "text": 1}]}]', "a part that is not"),
        ('[{"role": "user", "content": null}]', 'turn 1: no "content", which only a turn of the assistant'),
        ('[{"role": "assistant", "content": null, "tool_calls": []}]', 'no "content"'),
        ('[{"role": "assistant", "name": "x"}]', 'no "content"'),
        ('[{"role": "assistant", "content": "1", "tool_calls": "f()"}]', '"tool_calls" is not a list of objects'),
        ('[{"role": "assistant", "content": "1", "reasoning": 2}]', '"reasoning" is a number; expected a text'),
        (r'[{"role": "user", "content": "\ud800"}]', r"'\ud800' is half of a surrogate pair"),
        (r'{"messages": [{"role": "user", "content": "1"}], "tools": [{"\udc00": 1}]}', "half of a surrogate pair"),
        ('{"messages": ' + "[" * 20000 + "]" * 20000 + "}", "not JSON: nested too deeply"),
    ],
)
def test_mistakes_name_the_field(line, says):
    with pytest.raises(UserError) as error:
        parse_conversation(line.encode())
    assert says in str(error.value)


def test_labels_have_the_kind_of_their_turn(tmp_path):
    class Kinds(Words):
        def encode_conversation(self, messages):
            ids, learned = super().encode_conversation(messages)
            return ids, [kind and 1 + index % 2 for index, kind in zip(ids, learned, strict=True)]

    path = write(tmp_path / "talks.jsonl", [2])
    config = GPTDatasetConfig(1, 6, blend=([path], None), split="1,0,0", tokenizer=Kinds())
    item = SFTDataset(SFTConversations(path, Kinds()), path, range(1), None, Split.train, config)[0]
    assert item["labels"].tolist() == [2, 3, 4, 0, 0, 0]
    assert item["loss_mask"].tolist() == [0, 1, 1, 0, 0, 0]
    assert item["turn_kinds"].tolist() == [0, 1, 0, 0, 0, 0]
    assert collate_gpt([item, item]).sources.tolist() == [[0, 1, 0, 0, 0, 0]] * 2
