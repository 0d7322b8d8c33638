"""Megatron-LM's save and load: any parts in, any parts out, shared values keep their types, losses are reported."""

import argparse
import json

import pytest
import torch
from support.processes import run_on_ranks

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StrictHandling,
)
from megatron.core.dist_checkpointing.manifest import MANIFEST, Manifest
from megatron.core.exceptions import UserError

WHOLE = torch.arange(6 * 4, dtype=torch.float32).view(6, 4) + 1


def whole(key: str = "w", data: torch.Tensor | None = None, **fields) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, WHOLE.clone() if data is None else data, **fields)


def empty(key: str = "w", shape: tuple[int, ...] = (6, 4)) -> ShardedTensor:
    return ShardedTensor(key, None, torch.float32, shape, shape, (0,) * len(shape), None)


STATE = {
    "count": 3,
    "rate": 1e-3,
    "name": "a b",
    "none": None,
    "flag": True,
    "infinite": float("inf"),
    "dtype": torch.bfloat16,
    "nest": {"list": [1, (2, "x"), {"k": 5}], 0: "zero", ("a", 1): 2},
    "$odd": {"$tuple": [1]},
    "args": argparse.Namespace(lr=1e-4, words=["a"]),
    "step": torch.tensor(7),
    "tensors": [torch.arange(3, dtype=torch.int16), torch.ones(2, 2, dtype=torch.bfloat16), torch.zeros(0)],
}


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


FORGED = [
    {"$tensor": 3},
    {"$tensor": ["common.step", "F128", [], 0]},
    {"$tensor": ["common.step", "I64", [-1], 0]},
    {"$tensor": ["common.step", "I64", [1 << 62, 1 << 62], 0]},
    {"$tensor": ["common.elsewhere", "I64", [], 0]},
    {"$tuple": 7},
    {"$dict": [[1, 2, 3]]},
    {"$dict": [[[1], 2]]},
    {"$dtype": []},
    {"$namespace": {"$tuple": []}},
]


def forge(folder, value):
    dist_checkpointing.save({"step": torch.tensor(7), "w": whole()}, str(folder))
    path = folder / MANIFEST
    manifest = Manifest.from_bytes(path.read_bytes(), path)
    manifest.common["state_dict"]["forged"] = value
    path.write_bytes(manifest.to_bytes())
    return path


def test_memory_of_a_tensor_that_is_in_no_file_is_not_returned(tmp_path):
    forge(tmp_path / "c", {"$tensor": ["common.elsewhere", "I64", [], 0]})
    with pytest.raises(UserError, match=r"common\.elsewhere is in no file"):
        dist_checkpointing.load({"w": whole()}, str(tmp_path / "c"), strict="ignore_all")


@pytest.mark.parametrize("value", FORGED, ids=str)
def test_forged_shared_values_are_refused(tmp_path, value):
    folder = tmp_path / "c"
    path = forge(folder, value)
    for ask in (
        lambda: dist_checkpointing.load_common_state_dict(folder),
        lambda: dist_checkpointing.load({"w": whole()}, str(folder)),
    ):
        with pytest.raises(UserError, match=rf"{path.parent}"):
            ask()


def test_shared_values_keep_their_types(tmp_path):
    dist_checkpointing.save(STATE | {"w": whole()}, str(tmp_path / "c"), content_metadata={"format": 2})
    assert same(dist_checkpointing.load_common_state_dict(tmp_path / "c"), STATE)
    assert dist_checkpointing.load_content_metadata(tmp_path / "c") == {"format": 2}
    loaded = dist_checkpointing.load({"w": empty()}, str(tmp_path / "c"))
    assert torch.equal(loaded.pop("w"), WHOLE) and same(loaded, STATE)


def test_places_in_lists_and_values_that_are_not_saved(tmp_path):
    kept = object()
    state = {"a": {"list": [whole("x"), 5, (whole("y"), "t")]}, "kept": LocalNonpersistentObject(kept)}
    dist_checkpointing.save(state, str(tmp_path / "c"))
    wanted = {"a": {"list": [empty("x"), None, (empty("y"), None)]}, "kept": LocalNonpersistentObject(kept)}
    loaded = dist_checkpointing.load(wanted, str(tmp_path / "c"))
    assert loaded["kept"] is kept and loaded["a"]["list"][1] == 5
    assert torch.equal(loaded["a"]["list"][0], WHOLE) and torch.equal(loaded["a"]["list"][2][0], WHOLE)
    assert loaded["a"]["list"][2][1] == "t"


def test_live_tensors_are_filled_in_place(tmp_path):
    dist_checkpointing.save({"w": whole()}, str(tmp_path / "c"))
    live = torch.zeros(4, 6).t()  # not contiguous
    loaded = dist_checkpointing.load({"w": ShardedTensor.from_rank_offsets("w", live)}, str(tmp_path / "c"))
    assert torch.equal(live, WHOLE) and loaded["w"].data_ptr() == live.data_ptr()


def test_another_size_where_it_is_allowed(tmp_path):
    dist_checkpointing.save({"w": whole()}, str(tmp_path / "c"))
    for shape in ((8, 4), (5, 4), (5, 6)):
        rows, columns = min(6, shape[0]), min(4, shape[1])
        data = torch.full(shape, -1.0)
        wanted = whole(data=data, allow_shape_mismatch=True)
        loaded = dist_checkpointing.load({"w": wanted}, str(tmp_path / "c"))["w"]
        expected = torch.full(shape, -1.0)
        expected[:rows, :columns] = WHOLE[:rows, :columns]
        assert torch.equal(loaded, expected)
    with pytest.raises(UserError, match=r"has shape \[8, 4\] in this run and \[6, 4\]"):
        dist_checkpointing.load({"w": whole(data=torch.zeros(8, 4))}, str(tmp_path / "c"))


def test_a_flattened_range_and_a_prepended_axis(tmp_path):
    halves = [
        ShardedTensor.from_rank_offsets(
            "w", WHOLE.reshape(-1)[a:b].clone(), flattened_range=slice(a, b), local_shape=(6, 4)
        )
        for a, b in ((0, 9), (9, 24))
    ]
    layers = {
        str(number): ShardedTensor.from_rank_offsets("layers.w", WHOLE + number, (0, number, 3), prepend_axis_num=1)
        for number in range(3)
    }
    dist_checkpointing.save({"halves": halves, "layers": layers}, str(tmp_path / "c"))
    loaded = dist_checkpointing.load({"w": empty(), "layers": empty("layers.w", (3, 6, 4))}, str(tmp_path / "c"))
    assert torch.equal(loaded["w"], WHOLE)
    assert torch.equal(loaded["layers"], torch.stack([WHOLE, WHOLE + 1, WHOLE + 2]))


RAISES = {"assume_ok_unexpected", "raise_unexpected", "raise_all"}


@pytest.mark.parametrize("strict", list(StrictHandling))
def test_keys_of_one_side_only(tmp_path, capsys, strict):
    dist_checkpointing.save({"w": whole(), "extra": whole("extra")}, str(tmp_path / "c"))
    folder = str(tmp_path / "c")
    if strict.value in RAISES:
        with pytest.raises(UserError, match="1 keys of this run are not in it: other"):
            dist_checkpointing.load({"w": empty(), "o": empty("other")}, folder, strict=strict.value)
    else:
        found = dist_checkpointing.load({"w": empty(), "o": empty("other")}, folder, strict=strict)
        state = found
        if strict.returns:
            state, missing, unexpected = found
            assert unexpected == {"other"} and missing == ({"extra"} if strict.name == "RETURN_ALL" else set())
        assert set(state) == {"w"} and torch.equal(state["w"], WHOLE)
        said = capsys.readouterr().out
        assert ("other" in said and "extra" in said) == (strict is not StrictHandling.IGNORE_ALL)
    if strict is StrictHandling.RAISE_ALL:
        with pytest.raises(UserError, match="1 of its keys are not used by this run: extra"):
            dist_checkpointing.load({"w": empty()}, folder, strict=strict)


class Unknown:
    pass


def test_what_cannot_be_saved_is_named(tmp_path):
    folder = str(tmp_path / "c")
    with pytest.raises(UserError, match=r"a\.0 is a Unknown, which a checkpoint cannot contain"):
        dist_checkpointing.save({"a": [Unknown()]}, folder)
    with pytest.raises(UserError, match=r"nest\.w \(key w\) has no data"):
        dist_checkpointing.save({"nest": {"w": empty()}}, folder)
    with pytest.raises(UserError, match="async_sharded_save=True"):
        dist_checkpointing.save({}, folder, async_sharded_save=True)
    with pytest.raises(UserError, match="a Unknown as strategy"):
        dist_checkpointing.save({}, folder, sharded_strategy=Unknown())
    with pytest.raises(UserError, match="12 elements of w are in no file"):
        half = ShardedTensor.from_rank_offsets("w", WHOLE[:3].clone(), (0, 0, 2))
        dist_checkpointing.save({"w": half}, folder)
    with pytest.raises(UserError, match="elements of w are also in"):
        dist_checkpointing.save({"w": whole(), "v": ShardedTensor.from_rank_offsets("w", WHOLE[:3], (0, 0, 2))}, folder)
    assert not list(tmp_path.iterdir())  # nothing is left of any of these
    with pytest.raises(UserError, match="strict='loose'"):
        dist_checkpointing.load({}, folder, strict="loose")
    with pytest.raises(UserError, match="no such folder"):
        dist_checkpointing.load({}, folder)


def test_a_folder_that_holds_something_is_not_written_into(tmp_path, capsys):
    dist_checkpointing.save({"w": whole()}, str(tmp_path), sharded_strategy=("torch_dist", 1))  # empty: fine
    assert "always written as safetensors" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {
        "manifest.json",
        "rank_00000.json",
        "rank_00000.safetensors",
    }
    with pytest.raises(UserError, match="is not empty"):
        dist_checkpointing.save({"w": whole()}, str(tmp_path))
    json.loads((tmp_path / "manifest.json").read_text())
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "__0_0.distcp").touch()
    with pytest.raises(UserError, match="another program's checkpoint"):
        dist_checkpointing.load({}, str(foreign))


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks


def _save_on_ranks(folder: str) -> None:
    rank = torch.distributed.get_rank()
    rows = WHOLE.chunk(2)[rank].clone()
    replica = ShardedTensor.from_rank_offsets("copy", WHOLE + rank, replica_id=(0, rank))  # the first one counts
    state = {"rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, 2)), "copy": replica, "count": 4}
    dist_checkpointing.save(state | {"mine": LocalNonpersistentObject(rank)}, folder)
    columns = ShardedTensor.from_rank_offsets("rows", torch.zeros(6, 2), (1, 1 - rank, 2))
    wanted = {"c": columns, "copy": empty("copy"), "mine": LocalNonpersistentObject(rank)}
    loaded = dist_checkpointing.load(wanted, folder, strict="raise_all")
    assert torch.equal(loaded["c"], WHOLE.chunk(2, 1)[1 - rank]) and torch.equal(loaded["copy"], WHOLE)
    assert loaded["count"] == 4 and loaded["mine"] == rank
    # A key that one rank alone asks for is used; one that no rank asks for is missing.
    alone = {"c": columns} if rank else {"copy": empty("copy")}
    _, missing, unexpected = dist_checkpointing.load(alone, folder, strict="return_all")
    assert missing == unexpected == set()
    for strange, text in (({"count": rank}, "not the same on all ranks: count"), ({"x": [rank, object()]}, "object")):
        with pytest.raises(UserError, match=text):
            dist_checkpointing.save(strange, folder + "-not")
    dist_checkpointing.save(
        {"a": 1, "rank": rank},
        folder + "-2",
        preprocess_common_before_consistancy_check=lambda state: {"a": state["a"]},
    )
    assert dist_checkpointing.load_common_state_dict(folder + "-2") == {"a": 1, "rank": 0}
    with pytest.raises(UserError, match="folder"):  # one rank's mistake is everybody's error
        dist_checkpointing.load({}, folder if rank else folder + "-not")


def test_parts_of_several_ranks(tmp_path):
    run_on_ranks(_save_on_ranks, 2, str(tmp_path / "c"))


def test_objects_of_several_places(tmp_path):
    state = {
        "w": whole(),
        "rng": [ShardedObject("rng", {"n": n, "t": torch.full((2,), n)}, (2,), (n,)) for n in (0, 1)],
    }
    dist_checkpointing.save(state, str(tmp_path / "c"))
    request = {"w": empty(), "second": ShardedObject("rng", None, (2,), (1,))}
    loaded = dist_checkpointing.load(request, str(tmp_path / "c"))
    assert loaded["second"]["n"] == 1 and loaded["second"]["t"].tolist() == [1, 1]
    with pytest.raises(CheckpointingException, match=r"has no rng/shard_2_3"):
        dist_checkpointing.load({"third": ShardedObject("rng", None, (3,), (2,))}, str(tmp_path / "c"))
    loaded, _, unexpected = dist_checkpointing.load(
        {"third": ShardedObject("rng", None, (3,), (2,))}, str(tmp_path / "c"), strict=StrictHandling.RETURN_ALL
    )
    assert "third" not in loaded and unexpected == {"rng/shard_2_3"}


def test_two_writers_of_one_object_are_named(tmp_path):
    twice = {"a": ShardedObject("rng", 1, (1,), (0,)), "b": ShardedObject("rng", 2, (1,), (0,), replica_id=1)}
    dist_checkpointing.save(twice, str(tmp_path / "c"))
    assert dist_checkpointing.load({"b": twice["b"].without_data()}, str(tmp_path / "c"))["b"] == 1


def test_a_factory_stores_two_tensors_in_place_of_one(tmp_path):
    def halves(key, tensor, replica_id, flattened_range):
        return {name: whole(f"{key}.{name}", half) for name, half in zip("gu", tensor.chunk(2), strict=True)}

    def factory(data):
        return {"fc1": ShardedTensorFactory("fc1", data, halves, lambda parts: torch.cat([parts["g"], parts["u"]]))}

    dist_checkpointing.save(factory(WHOLE.clone()), str(tmp_path / "c"))
    stored = dist_checkpointing.load_plain_tensors(tmp_path / "c")
    assert stored.keys() == {"fc1.g", "fc1.u"} and torch.equal(stored["fc1.u"], WHOLE[3:])
    loaded = dist_checkpointing.load(factory(torch.zeros(6, 4)), str(tmp_path / "c"))
    assert torch.equal(loaded["fc1"], WHOLE)


def test_a_saved_folder_is_not_changed(tmp_path):
    with pytest.raises(CheckpointingException, match="save them into another folder"):
        dist_checkpointing.remove_sharded_tensors(tmp_path, "optimizer.")
