"""Any layout loads any other: random boxes and flat ranges against slices of whole tensors; keys, shapes and types."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import filled, load_as, make_chunk, save_as, slice_of, whole_tensor

from megatron.core.dist_checkpointing import data_file, planning
from megatron.core.dist_checkpointing.checkpoint import open_checkpoint
from megatron.core.dist_checkpointing.chunk import Chunk, optimizer_state_name
from megatron.core.dist_checkpointing.planning import MismatchPolicy
from megatron.core.dist_checkpointing.reading import load
from megatron.core.dist_checkpointing.writing import save
from megatron.core.exceptions import UserError
from megatron.core.parameters import Box

EMPTY = {"common": {}, "config": {}, "layout": {}}


@contextlib.contextmanager
def small_blocks():
    """Blocks and cuts of a few bytes, so that small tensors meet all their edges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_file, "BLOCK_BYTES", 48)
        patch.setattr(planning, "_CUT_ABOVE_BYTES", 16)
        yield


def grid_boxes(shape, counts):
    """The boxes of a tensor cut into `counts` near-equal parts along each dimension."""
    spans = []
    for size, count in zip(shape, counts, strict=True):
        cuts = [size * i // count for i in range(count + 1)]
        spans.append([(a, b - a) for a, b in itertools.pairwise(cuts) if b > a])
    return [Box(tuple(a for a, _ in at), tuple(n for _, n in at)) for at in itertools.product(*spans)]


@st.composite
def layouts(draw, tensors):
    """Chunks by rank: each tensor cut into a grid of boxes, each box held by several ranks or cut into flat ranges."""
    world = draw(st.integers(1, 4))
    ranks = [[] for _ in range(world)]
    for name, shape in tensors:
        for box in grid_boxes(shape, [draw(st.integers(1, 3)) for _ in shape]):
            if draw(st.booleans()):
                holders = tuple(sorted(draw(st.sets(st.integers(0, world - 1), min_size=1))))
                for rank in holders:
                    ranks[rank].append(make_chunk(name, shape, box, holders=holders))
            else:
                cuts = sorted({0, box.numel, *draw(st.lists(st.integers(0, box.numel), max_size=3))})
                for flat_range in itertools.pairwise(cuts):
                    ranks[draw(st.integers(0, world - 1))].append(make_chunk(name, shape, box, flat_range))
    return ranks


tensor_lists = st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=3).map(
    lambda shapes: [(f"t{i}", shape) for i, shape in enumerate(shapes)]
)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), tensors=tensor_lists)
def test_any_layout_loads_any_other(data, tensors, tmp_path_factory):
    written, read = data.draw(layouts(tensors)), data.draw(layouts(tensors))
    with small_blocks():
        folder = save_as(tmp_path_factory.mktemp("any"), written)
        for chunks in read:
            targets = [Chunk(c.name, c.global_shape, c.box, c.flat_range, torch.zeros_like(c.tensor)) for c in chunks]
            load_as(folder, targets)
            for target in targets:
                assert torch.equal(target.tensor, filled(target)), target


def test_the_fixture_reaches_the_edges(tmp_path):
    """Blocks of 48 bytes cut a float32 tensor of 100 elements into nine, and three replicas into more chunks."""
    with small_blocks():
        holders = (0, 1, 2)
        save_as(tmp_path, [[make_chunk("a", (10, 10), holders=holders)] for _ in holders])
        catalogue = open_checkpoint(tmp_path / "iter_0000010").catalogue
    assert [located.chunk.range for located in catalogue["a"]] == [(0, 34), (34, 67), (67, 100)]
    assert sum(len(located.chunk.checksums) for located in catalogue["a"]) == 9


def test_every_dtype_comes_back_bit_equal(tmp_path):
    dtypes = list(data_file.DTYPE_NAMES)
    raw = torch.randint(0, 256, (7 * 8,), dtype=torch.uint8)
    values = {
        str(dtype): raw.view(dtype).clone() if dtype != torch.bool else raw > 100 for dtype in dtypes
    }  # NaN payloads included
    chunks = [Chunk(name, tuple(v.shape), Box.whole(tuple(v.shape)), None, v) for name, v in values.items()]
    save(tmp_path, chunks, step=1, **EMPTY)
    targets = [Chunk(c.name, c.global_shape, c.box, None, torch.zeros_like(c.tensor)) for c in chunks]
    assert load(tmp_path, targets, log=fail) is not None
    for chunk, target in zip(chunks, targets, strict=True):
        assert torch.equal(chunk.flat.view(torch.uint8), target.flat.view(torch.uint8)), chunk


def fail(sentence):
    raise AssertionError(f"nothing was to be said: {sentence}")


def saved(tmp_path, *chunks):
    save(tmp_path, chunks, step=1, **EMPTY)


def test_loading_writes_into_the_live_memory(tmp_path):
    """Views of one flat buffer, as units hold them."""
    saved(tmp_path, make_chunk("a", (2, 3)), make_chunk("b", (4,)))
    buffer = torch.zeros(12)
    load(
        tmp_path,
        [
            Chunk("a", (2, 3), Box.whole((2, 3)), None, buffer[1:7]),
            Chunk("b", (4,), Box.whole((4,)), None, buffer[8:12]),
        ],
    )
    expected = torch.zeros(12)
    expected[1:7], expected[8:12] = whole_tensor("a", (2, 3)).view(-1), whole_tensor("b", (4,))
    assert torch.equal(buffer, expected)


def test_a_missing_and_an_unused_key_are_errors_that_name_them(tmp_path):
    saved(tmp_path, make_chunk("kept", (2,)), make_chunk("stale", (2,)))
    wanted = [make_chunk("kept", (2,), empty=True), make_chunk("fresh", (2,), empty=True)]
    with pytest.raises(UserError) as error:
        load(tmp_path, wanted)
    assert "1 keys of this run are not in it: fresh" in str(error.value)
    assert "1 of its keys are not used by this run: stale" in str(error.value)
    assert not wanted[0].tensor.any()  # nothing was read


@pytest.mark.parametrize(
    "policy",
    [MismatchPolicy(missing=True, unused=True), MismatchPolicy(patterns=("fre*", "stale"))],
    ids=["any", "by name"],
)
def test_what_is_tolerated_is_told(tmp_path, policy):
    saved(tmp_path, make_chunk("kept", (2,)), make_chunk("stale", (2,)))
    wanted = [make_chunk("kept", (2,), empty=True), make_chunk("fresh", (2,))]
    told = []
    load(tmp_path, wanted, policy=policy, log=told.append)
    assert told == [
        "1 keys are not in the checkpoint and keep their values: fresh",
        "1 keys of the checkpoint are not used: stale",
    ]
    assert torch.equal(wanted[0].tensor, filled(wanted[0])) and torch.equal(wanted[1].tensor, filled(wanted[1]))


def test_a_tolerance_for_missing_keys_does_not_cover_unused_ones(tmp_path):
    saved(tmp_path, make_chunk("kept", (2,)), make_chunk("stale", (2,)))
    with pytest.raises(UserError, match="stale"):
        load(tmp_path, [make_chunk("kept", (2,))], policy=MismatchPolicy(missing=True))


def test_another_shape_is_an_error_that_names_both(tmp_path):
    saved(tmp_path, make_chunk("a", (2, 3)))
    with pytest.raises(UserError, match=r"a has shape \[3, 2\] in this run and \[2, 3\] in the checkpoint"):
        load(tmp_path, [make_chunk("a", (3, 2))], policy=MismatchPolicy(missing=True, unused=True))


def master(name, shape, **facts):
    return make_chunk(optimizer_state_name("param", name), shape, **facts)


def test_masters_of_a_new_run_come_from_full_precision_weights(tmp_path):
    """A float32 checkpoint into a bfloat16 run with float32 masters."""
    saved(tmp_path, make_chunk("w", (3,)))
    told: list[str] = []
    weight, copy = make_chunk("w", (3,), dtype=torch.bfloat16, empty=True), master("w", (3,), empty=True)
    load(tmp_path, [weight, copy], log=told.append)
    assert torch.equal(copy.tensor, whole_tensor("w", (3,)))
    assert torch.equal(weight.tensor, whole_tensor("w", (3,), torch.bfloat16))
    assert told == [
        "full-precision main weights are read from the weights",
        "tensors stored as float32 are loaded as bfloat16",
    ]


def test_weights_of_another_type_come_from_the_masters(tmp_path):
    """A bfloat16 checkpoint with masters into a float32 run without: no bits are lost, and nothing counts as unused."""
    full = make_chunk("w", (3,)).tensor + 0.001
    saved(
        tmp_path,
        make_chunk("w", (3,), dtype=torch.bfloat16),
        Chunk(optimizer_state_name("param", "w"), (3,), Box.whole((3,)), None, full),
    )
    told: list[str] = []
    weight = make_chunk("w", (3,), empty=True)
    load(tmp_path, [weight], log=told.append)
    assert torch.equal(weight.tensor, full)
    assert told == ["weights are read from the full-precision main weights"]


def test_masters_that_a_run_of_the_same_type_does_not_want_are_unused(tmp_path):
    saved(tmp_path, make_chunk("w", (3,)), master("w", (3,)))
    with pytest.raises(UserError, match=r"not used by this run: optimizer\.param\.w"):
        load(tmp_path, [make_chunk("w", (3,))])


def test_a_large_tensor_goes_through_in_blocks(tmp_path):
    """More than two blocks, real block size, cut over two ranks and read by three."""
    count = (5 * data_file.BLOCK_BYTES) // 2 // 4 + 7
    values = torch.randn(count)
    box = Box.whole((count,))
    save_as(tmp_path, [[Chunk("a", (count,), box, None, values, (0, 1))] for _ in range(2)])
    for flat_range in ((0, count // 3), (count // 3, count - 1), (count - 1, count)):
        target = Chunk("a", (count,), box, flat_range, torch.zeros(flat_range[1] - flat_range[0]))
        load_as(tmp_path / "iter_0000010", [target])
        assert torch.equal(target.tensor, slice_of(values, box, flat_range))
