"""Pickles are read as data: hostile ones are refused or become records, and nothing runs."""

import argparse
import collections
import os
import pickle
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.conversion.megatron_lm.inert_pickle import Inert, Name, UnreadablePickle, read_pickle, shown


class Reduced:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def test_plain_data_is_what_pickle_reads() -> None:
    value = {
        "args": [1, -2, 2**70, 1.5, None, True, False, b"bytes", "text", ("a", ("b",)), {}, []],
        ("key", 3): {"nested": [list(range(300))]},
        "ordered": collections.OrderedDict([("x", 1), ("y", [2])]),
    }
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        found = read_pickle(pickle.dumps(value, protocol=protocol), "file")
        if protocol >= 3:  # earlier ones write bytes as a call
            assert found == value
        assert found["ordered"] == {"x": 1, "y": [2]} and found["key", 3] == {"nested": [list(range(300))]}


def test_objects_become_records() -> None:
    for protocol in (0, 2, 4):
        found = read_pickle(pickle.dumps(argparse.Namespace(seed=3, lr=[1e-3]), protocol=protocol), "file")
        assert isinstance(found, Inert) and str(found.made_by) == "argparse.Namespace"
        assert found.attribute("seed") == 3 and found.attribute("lr") == [1e-3]
    with pytest.raises(UnreadablePickle, match=r"a argparse.Namespace has no wd"):
        found.attribute("wd")


def hostile(marker: Path) -> dict[str, bytes]:
    command = f"touch {marker}"
    nested = {"model": [{"weight": Reduced(os.system, command)}]}
    return {
        "os.system": pickle.dumps(Reduced(os.system, command)),
        "os.system, oldest protocol": pickle.dumps(Reduced(os.system, command), protocol=0),
        "deep inside": pickle.dumps(nested),
        "subprocess": pickle.dumps(Reduced(subprocess.call, ["touch", str(marker)])),
        "eval": pickle.dumps(Reduced(eval, f"open({str(marker)!r}, 'w')")),
        "exec": pickle.dumps(Reduced(exec, f"open({str(marker)!r}, 'w')")),
        "open": pickle.dumps(Reduced(open, str(marker), "w")),
        "getattr": b"c__builtin__\ngetattr\n.",
        "import": b"cbuiltins\n__import__\n(S'os'\ntR.",
        "nested name": b"\x80\x04\x8c\x02os\x8c\x0bpath.system\x93.",
        "name made of a record": b"\x80\x04]\x8c\x06system\x93.",
        "inst": b"(S'touch " + str(marker).encode() + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'true'\no.",
        "extension": b"\x82\x01.",
        "persistent id as text": b"Pname\n.",
        "buffers": b"\x80\x05\x97.",
        "a call of a string": b"\x80\x02U\x04callU\x01a\x85R.",
        "memo beyond all memory": b"\x80\x02Nr\xff\xff\xff\x7f\x30j\xfe\xff\xff\x7f.",
        "bytes beyond the file": b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"x.",
        "text beyond the file": b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b"x.",
        "an endless number": b"I" + b"9" * 100_000 + b"\n.",
        "no end": b"\x80\x04N",
        "nothing": b"",
        "an empty stack": b"\x80\x040.",
        "a mark that is missing": b"\x80\x04e.",
        "a key that hashes for ever": b"\x80\x02}(K\x01" + b"2\x86" * 60 + b"Ns.",
        "a list as key": b"\x80\x02}]Ns.",
        "items of a number": b"\x80\x02K\x01(K\x01K\x02u.",
        "no pickle": bytes(range(256)),
    }


def test_a_corpus_of_hostile_pickles(tmp_path: Path) -> None:
    marker, began = tmp_path / "ran", time.monotonic()
    for name, content in hostile(marker).items():
        with pytest.raises(UnreadablePickle, match="file: "):
            raise AssertionError(f"{name} was read as {read_pickle(content, 'file')!r}")
    assert not marker.exists()
    assert time.monotonic() - began < 60


def test_the_message_names_the_function_that_is_refused() -> None:
    with pytest.raises(UnreadablePickle, match=r"common.pt: it names posix.system, .*nothing of it was executed"):
        read_pickle(pickle.dumps(Reduced(os.system, "true")), "common.pt")


def test_functions_of_known_packages_are_not_called_either(tmp_path: Path) -> None:
    """torch.load of another file, numpy's exec and Python's partial are names like any other."""
    content = b"\x80\x04\x8c\x13torch.serialization\x8c\x04load\x93\x8c\x04file\x85R."
    found = read_pickle(content, "file")
    assert found.made_by == Name("torch.serialization", "load") and found.arguments == ("file",)
    dotted = read_pickle(b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.", "file")
    assert dotted == Name("torch", "os.system")


def test_sharing_does_not_multiply_memory() -> None:
    """A list that holds one list twice, a hundred levels deep."""
    value: list[Any] = []
    for _ in range(100):
        value = [value, value]
    assert read_pickle(pickle.dumps(value), "file")[0] is not None


def test_calls_do_not_multiply_memory() -> None:
    """A list that many calls would copy."""
    pairs = [(number, None) for number in range(1000)]
    calls = [Reduced(collections.OrderedDict, pairs) for _ in range(100)]
    with pytest.raises(UnreadablePickle, match="dicts with more items than the pickle has"):
        read_pickle(pickle.dumps(calls), "file")
    with pytest.raises(UnreadablePickle, match=r"a torch.Size of 1000 numbers"):
        read_pickle(b"\x80\x02ctorch\nSize\n](" + b"K\x01" * 1000 + b"e\x85R.", "file")


def test_messages_do_not_show_what_is_nested() -> None:
    value: Any = 1
    for _ in range(200):
        value = (value, value)
    assert shown(value) == "a tuple" and shown(Inert(Name("a", "b"), value)) == "a Inert"
    assert shown((1, "x")) == "(1, 'x')" and shown(Name("a", "b")) == "a.b"
