"""Connections to stores: one for each process and scheme."""

import fsspec
import pytest

from megatron.core.exceptions import UserError
from megatron.core.utils.stores import file_system, is_url


def test_urls() -> None:
    assert is_url("s3://bucket/run") and is_url("GS://b") and not is_url("runs/s3") and not is_url("C:/runs")


def test_a_connection_is_kept() -> None:
    assert file_system("memory://a") is file_system("memory://b")
    assert file_system("memory://a") is not fsspec.filesystem("memory")
    with pytest.raises(UserError, match="unheardof:// is no kind of store that fsspec knows"):
        file_system("unheardof://a")
