"""Files of torch.save are read by ranges; damaged and hostile ones are refused."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.conversion.megatron_lm import torch_archive
from megatron.conversion.megatron_lm.torch_archive import StoredTensor, TorchArchive
from megatron.core.exceptions import UserError


def saved(value: Any, path: Path) -> TorchArchive:
    torch.save(value, path)
    return TorchArchive(path)


def test_tensors_of_all_kinds(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    types = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8)
    types = (*types, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
    tensors = {
        **{str(dtype): base.to(dtype) for dtype in types},
        "whole": base,
        "rows": base[1:3],
        "transposed": base.t(),
        "column": base[:, 2],
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(base.clone()),
    }
    found = saved(tensors, tmp_path / "file.pt").load()
    for name, tensor in tensors.items():
        stored = found[name]
        assert isinstance(stored, StoredTensor) and (stored.shape, stored.dtype) == (tensor.shape, tensor.dtype), name
        values = tensor.detach().contiguous().view(-1)
        assert stored.read().view(torch.uint8).equal(values.view(torch.uint8)), name
        if values.numel() > 3:
            assert stored.read(1, 3).view(torch.uint8).equal(values[1:3].clone().view(torch.uint8)), name


def test_an_archive_inside_a_file(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "inner.pt")
    inner = (tmp_path / "inner.pt").read_bytes()
    (tmp_path / "outer").write_bytes(b"before" + inner + b"behind")
    found = TorchArchive(tmp_path / "outer", 6, len(inner)).load()
    assert found["a"].read().tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(UserError, match="bytes 6 to"):
        TorchArchive(tmp_path / "outer", 6, len(inner) + 100)


def rewritten(source: Path, target: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> Path:
    """Copies an archive; `change` maps names to other contents."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            content = change.get(name.split("/", 1)[1], old.read(name))
            if content is not None:
                new.writestr(name, content)
    return target


def tensor_pickle(*, kind: bytes = b"FloatStorage", numel: int = 4, offset: int = 0, shape: Any, strides: Any) -> bytes:
    """The pickle of one tensor, as torch.save writes it."""
    storage = b"(X\x07\x00\x00\x00storagectorch\n" + kind + b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    storage += pickle.dumps(numel, 2)[2:-1] + b"tQ"
    numbers = b"".join(pickle.dumps(value, 2)[2:-1] for value in (offset, shape, strides))
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + numbers + b"\x89}tR."


NESTED: Any = 1
for _ in range(16):
    NESTED = (NESTED, NESTED)


def test_damaged_and_hostile_archives(tmp_path: Path) -> None:
    good = tmp_path / "good.pt"
    torch.save(torch.arange(4.0), good)
    normal = {"shape": (4,), "strides": (1,)}
    read = rewritten(good, tmp_path / "same.pt", {"data.pkl": tensor_pickle(**normal)})
    assert TorchArchive(read).load().read().tolist() == [0, 1, 2, 3]
    for name, content, message in (
        ("longer than its storage", tensor_pickle(shape=(5,), strides=(1,)), "in a storage of 4 elements"),
        ("behind its storage", tensor_pickle(offset=4, **normal), "in a storage of 4 elements"),
        ("negative strides", tensor_pickle(shape=(4,), strides=(-1,)), "strides"),
        ("repeated elements", tensor_pickle(shape=(1 << 40,), strides=(0,)), "in a storage of 4 elements"),
        ("more dimensions than torch has", tensor_pickle(shape=(1,) * 90, strides=(1,) * 90), "a tensor of shape"),
        ("text as a size", tensor_pickle(shape=("4",), strides=(1,)), "a tensor of shape"),
        ("nested numbers", tensor_pickle(shape=NESTED, strides=(1,)), "a tensor of shape a tuple with"),
        ("an unknown storage", tensor_pickle(kind=b"OsStorage", **normal), "a tensor of OsStorage"),
        ("a storage larger than its entry", tensor_pickle(numel=1 << 40, shape=(1 << 40,), strides=(1,)), "bytes"),
        ("a wider storage", tensor_pickle(kind=b"DoubleStorage", **normal), "data/0 has 16 bytes, a tensor needs 32"),
        ("os.system", b"cos\nsystem\n(S'true'\ntR.", "it names os.system"),
    ):
        path = rewritten(good, tmp_path / f"{name}.pt", {"data.pkl": content})
        with pytest.raises(UserError, match=message):
            raise AssertionError(TorchArchive(path).load().read())
    for name, path, message in (
        ("bomb", rewritten(good, tmp_path / "b.pt", {"data/0": bytes(1 << 20)}, zipfile.ZIP_DEFLATED), "is compressed"),
        ("no storage", rewritten(good, tmp_path / "n.pt", {"data/0": None}), "no entry data/0"),
        ("no pickle", rewritten(good, tmp_path / "p.pt", {"data.pkl": None}), "no entry data.pkl"),
        ("byte order", rewritten(good, tmp_path / "o.pt", {"byteorder": b"big"}), "another byte order"),
    ):
        with pytest.raises(UserError, match=message):
            raise AssertionError((name, TorchArchive(path).load().read()))


def test_a_long_pickle_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = saved(list(range(100)), tmp_path / "file.pt")
    monkeypatch.setattr(torch_archive, "MAX_PICKLE_BYTES", 100)
    with pytest.raises(UserError, match=r"data.pkl has \d+ bytes; at most 100 are read"):
        archive.load()


def test_a_flipped_byte_and_a_short_file(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save(torch.arange(1000.0), path)
    content = bytearray(path.read_bytes())
    at = content.index(torch.tensor([500.0, 501.0]).numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="data/0 does not match its checksum"):
        TorchArchive(path).load().read(0, 3)
    for size in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=r"file.pt: not a file of torch.save"):
            TorchArchive(path)
    with pytest.raises(UserError, match=r"none.pt: No such file"):
        TorchArchive(tmp_path / "none.pt")


def test_files_from_before_torch_1_6_are_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"not a file of torch.save"):
        TorchArchive(tmp_path / "old.pt")
