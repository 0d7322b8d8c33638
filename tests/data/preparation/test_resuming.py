"""megatron/data/preparation/resuming.py: a journal of finished blocks, believed as far as its bytes exist."""

import multiprocessing
import os

import numpy as np
import pytest

from megatron.core.exceptions import UserError
from megatron.data.preparation.inputs import InputFile
from megatron.data.preparation.messages import BlockReport, FileEnd, LineFault
from megatron.data.preparation.resuming import Journal, identity_of, lock_folder, working_folder
from megatron.data.preparation.shards import ShardPaths, StreamName, StreamWriter, frame_documents
from megatron.data.tokenizer.base import pack_ids

STREAM = StreamName(0, 0)


def write_blocks(folder, count=3):
    """A journal of one worker's blocks."""
    with StreamWriter(ShardPaths.of(folder, 0, STREAM), np.uint16) as writer, Journal(folder, np.uint16) as journal:
        journal.begin(100)
        for block in range(count):
            writer.append(frame_documents(pack_ids([[block, 5]]), np.ones(1, np.int64), None), 0)
            report = BlockReport(0, 0, block, lines=2, blank_lines=1, faults=[LineFault(1, "not JSON", "é")])
            report.dropped["not JSON"] += 1
            report.streams[STREAM], report.checksums[STREAM] = writer.end_block()
            journal.record(report)
        journal.record(BlockReport(0, 0, 9, stopped=True))
        journal.record(FileEnd(0, count))


def test_messages_come_back(tmp_path):
    write_blocks(tmp_path)
    with Journal(tmp_path, np.uint16) as journal:
        *reports, end = journal.messages
        assert (journal.block_bytes, journal.first_worker, journal.recorded) == (100, 1, True)
    assert end == FileEnd(0, 3) and [report.block for report in reports] == [0, 1, 2]
    assert reports[0].dropped == {"not JSON": 1} and reports[0].faults == [LineFault(1, "not JSON", "é")]
    assert reports[1].streams[STREAM].tokens == 2


@pytest.mark.parametrize("damage", ["short shard", "flipped shard", "torn journal", "missing shard"])
def test_only_intact_blocks_count(tmp_path, damage):
    write_blocks(tmp_path)
    tokens, journal_path = ShardPaths.of(tmp_path, 0, STREAM).tokens, tmp_path / "journal.jsonl"
    content = bytearray(tokens.read_bytes())
    content[9] ^= 1
    if damage == "torn journal":
        lines = journal_path.read_bytes().splitlines(keepends=True)
        journal_path.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    elif damage == "missing shard":
        tokens.unlink()
    else:
        tokens.write_bytes(content if damage == "flipped shard" else content[:9])
    expected = [] if damage == "missing shard" else [0, 1]
    for _ in range(2):  # opening the journal removes the lines that do not count
        with Journal(tmp_path, np.uint16) as journal:
            assert [report.block for report in journal.messages] == expected


def test_identity_is_that_of_input_and_settings():
    file = InputFile(0, "a", 10, modified_ns=5)
    first = identity_of([file], {"keys": ["text"]})
    assert first == identity_of([file], {"keys": ["text"]})
    others = [
        identity_of([file], {"keys": ["title"]}),
        identity_of([InputFile(0, "a", 10, modified_ns=6)], {"keys": ["text"]}),
        identity_of([file, file], {"keys": ["text"]}),
    ]
    assert len({first, *others}) == 4


def _try_lock(folder, connection):
    try:
        with lock_folder(folder, print):
            connection.send("locked")
    except UserError as error:
        connection.send(str(error))
    os._exit(0)


def test_a_second_process_is_refused(tmp_path):
    fork = multiprocessing.get_context("fork")
    answers = []
    with lock_folder(tmp_path / "work", print):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=_try_lock, args=(tmp_path / "work", theirs))
        process.start()
        answers.append(ours.recv())
        process.join()
    assert answers == [f"{tmp_path}/work: another process is preparing the same data right now; wait until it ends"]
    with lock_folder(tmp_path / "work", print):
        pass


def test_numbers_of_workers_are_not_used_again(tmp_path):
    """A worker of a killed run may create its shard late, even if the journal is damaged before its line."""
    write_blocks(tmp_path)
    with Journal(tmp_path, np.uint16) as journal:
        assert journal.first_worker == 1
        journal.start_workers(3)
    ShardPaths.of(tmp_path, 0, STREAM).tokens.write_bytes(b"")
    with Journal(tmp_path, np.uint16) as journal:
        assert journal.first_worker == 4 and not journal.messages
        journal.start_workers(2)
    with Journal(tmp_path, np.uint16) as journal:
        assert journal.first_worker == 6 and journal.block_bytes == 100


def test_the_folder_goes_after_success_and_mistakes_and_stays_after_an_interruption(tmp_path):
    warnings: list[str] = []

    def work(identity="id"):
        return working_folder(str(tmp_path / "out"), "--output", f"cleaning.{identity}", warnings.append)

    with work() as working:
        assert working.path.is_dir()
    assert not working.path.exists()
    with pytest.raises(UserError, match="wrong"), work():
        raise UserError("wrong")
    assert not working.path.exists() and not warnings
    with pytest.raises(KeyboardInterrupt), work() as empty:
        empty.holds_work = lambda: False
        raise KeyboardInterrupt
    assert not working.path.exists() and not warnings
    with pytest.raises(KeyboardInterrupt), work():
        raise KeyboardInterrupt
    assert working.path.exists()
    with work("other"):
        pass
    assert len(warnings) == 1 and ".out.cleaning.id: left by a killed run" in warnings[0]
