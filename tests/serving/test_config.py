"""Flags of the server: names, addresses, keys, and what is wrong with them."""

from pathlib import Path

import pytest

from megatron.core.exceptions import UserError
from megatron.serving.config import ModelToServe, ServeConfig
from megatron.training.config.tool_flags import Section, read_tool_flags


def read(*words: str) -> tuple[ModelToServe, ServeConfig]:
    return read_tool_flags(words, [Section("model", ModelToServe), Section("server", ServeConfig)], "usage", "about")


def test_names_of_models() -> None:
    assert read("--load", "runs/big/checkpoints")[0].name == "big"
    assert read("--load", "runs/big")[0].name == "big"
    assert read("--load", "x", "--model-name", "other")[0].name == "other"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--load is required"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0: everybody who reaches this address .*; add --api-key-file FILE"),
        (["--host", "example.org"], "everybody"),
        (["--port", "70000"], "--port 70000 must be from 0 to 65535"),
        (["--api-key", "a", "--api-key-file", "b"], "not both"),
        (["--api-key", "ä"], "--api-key: give printable ASCII"),
        (["--max-texts", "0"], "--max-texts 0 must be at least 1"),
        (["--cache-gib", "0"], "--cache-gib 0.0 must be larger than 0"),
        (["--max-waiting-texts", "-1"], "--max-waiting-texts -1 must be at least 0"),
        (["--max-sequence-length", "1"], "--max-sequence-length 1 must be at least 2"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(*(["--load", "x"] if words else []), *words)


def test_addresses() -> None:
    for host, local in (("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.8.8.8", True)):
        assert read("--load", "x", "--host", host)[1].is_local is local
    assert not read("--load", "x", "--host", "10.0.0.1", "--api-key", "k")[1].is_local


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret \n")
    assert ServeConfig(api_key_file=str(file)).read_api_key() == "secret"
    assert ServeConfig(api_key="k").read_api_key() == "k" and ServeConfig().read_api_key() is None
    file.write_text("\nsecret")
    with pytest.raises(UserError, match="its first line has no key"):
        ServeConfig(api_key_file=str(file)).read_api_key()
    with pytest.raises(UserError, match=r"--api-key-file .*none"):
        ServeConfig(api_key_file=str(tmp_path / "none")).read_api_key()
