"""megatron/data/preparation/blocks.py: every line is in exactly one block, for any size of blocks."""

import gzip

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.exceptions import UserError
from megatron.data.preparation.blocks import LineReader, Plan, plan_blocks
from megatron.data.preparation.inputs import find_inputs

lines = st.lists(st.text('a"{} \ré', max_size=12).map(str.encode), max_size=20)


def read_blocks(path, block_bytes, shares=1, longest=1 << 20):
    """Lines of each block, as `shares` readers find them that each take every shares-th block."""
    (file,) = find_inputs([str(path)])
    found = {}
    for share in range(shares):
        with LineReader(file, longest) as reader:
            block = share
            while not reader.ended:
                reader.seek_line(block * block_bytes)
                found[block] = list(reader.lines_before((block + 1) * block_bytes))
                block += shares
    return [line for block in sorted(found) for line in found[block]]


PACKERS = {"plain": bytes, "gzip": gzip.compress, "zstd": zstandard.compress}


@pytest.mark.fast("False-zstd", "True-plain", "True-gzip")
@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("ends_with_line_end", [False, True])
def test_lines_are_in_one_block_each(tmp_path, kind, ends_with_line_end):
    path = tmp_path / "x.jsonl"

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(lines, st.integers(1, 30), st.integers(1, 4))
    def check(content, block_bytes, shares):
        text = b"\n".join(content) + (b"\n" if ends_with_line_end else b"")
        path.write_bytes(PACKERS[kind](text))
        *whole, rest = text.split(b"\n")
        assert read_blocks(path, block_bytes, shares) == [line + b"\n" for line in whole] + ([rest] if rest else [])

    check()


@pytest.mark.slow
def test_a_line_that_is_too_long_is_passed_over(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"abc\n" + b"x" * 3_000_000 + b"\n" + b"12345\n" + b"y" * 11)
    assert read_blocks(path, 1 << 20, longest=10) == [b"abc\n", None, b"12345\n", None]
    assert read_blocks(path, 7, shares=3, longest=10) == [b"abc\n", None, b"12345\n", None]
    assert read_blocks(path, 1 << 20, longest=5) == [b"abc\n", None, b"12345\n", None]


def test_reading_holds_no_more_than_the_longest_line(tmp_path):
    import tracemalloc

    path = tmp_path / "x.jsonl"
    path.write_bytes(b"x" * 40_000_000 + b"\n")
    tracemalloc.start()
    assert read_blocks(path, 1 << 20, longest=1000) == [None]
    assert tracemalloc.get_traced_memory()[1] < 6_000_000
    tracemalloc.stop()


def test_work_items_cover_all_blocks_once(tmp_path):
    plain, empty, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl.gz"
    plain.write_bytes(b"x\n" * 50_000)
    empty.write_bytes(b"")
    packed.write_bytes(gzip.compress(b"x\n" * 5000))
    plan = plan_blocks(find_inputs([str(plain), str(empty), str(packed)]), workers=3)
    blocks = [(item.file.index, item.first_block) for item in plan.work_items if item.blocks == 1]
    assert blocks == [(0, k) for k in range(plan.blocks_of(plan.files[0]))]
    assert [(item.first_block, item.step) for item in plan.work_items if item.blocks is None] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    assert plan.total_bytes == 100_000 + packed.stat().st_size


def test_many_compressed_files_are_each_read_once(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(b"x\n"))
    plan = plan_blocks(find_inputs([str(tmp_path / "*.gz")]), workers=2)
    assert [(item.file.index, item.step) for item in plan.work_items] == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_block_sizes():
    assert plan_blocks((), 4) == Plan((), (), 4096)


def test_the_size_of_blocks_can_be_that_of_an_earlier_run(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"x\n" * 5000)
    plan = plan_blocks(find_inputs([str(tmp_path / "a.jsonl")]), 1, block_bytes=100)
    assert plan.block_bytes == 100 and len(plan.work_items) == 100


@pytest.mark.parametrize("damage", ["cut", "flipped"])
@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_damaged_archive_is_named(tmp_path, damage, kind):
    path = tmp_path / "x.jsonl.packed"
    text = bytes(range(256)) * 4000
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(text) if kind == "zstd" else gzip.compress(text)
    content = bytearray(packed)
    if damage == "cut":
        del content[len(content) // 2 :]
    else:
        content[-4 if kind == "zstd" else -6] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"x.jsonl.packed: damaged after \d+ bytes of text.*{kind} -t says more"):
        read_blocks(path, 1 << 20)
