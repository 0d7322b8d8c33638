"""megatron/core/utils/url_keys.py: what is hidden, and what only looks like a key."""

import pytest

from megatron.core.exceptions import UserError
from megatron.core.utils.url_keys import hide_keys


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:SECRET@bucket/a", "s3://***@bucket/a"),
        ("s3://key:SEC/RET+x=@bucket/a and gs://b/c", "s3://***@bucket/a and gs://b/c"),
        ("s3:/key:SECRET@bucket/a", "s3:/***@bucket/a"),  # as a Path writes it
        ("https://SECRET@host/a, https://u:SECRET@host:80/b", "https://***@host/a, https://***@host:80/b"),
        ("['s3://k:SECRET@a', 's3://k:SECRET@b']", "['s3://***@a', 's3://***@b']"),
        ("az://c/a?sv=1&sig=SECRET%3D&se=2", "az://c/a?sv=1&sig=***&se=2"),
        ("https://h/a?X-Amz-Credential=SECRET&X-Amz-Signature=SECRET", "https://h/a?X-Amz-Credential=***&X-Amz-Signature=***"),
    ],
)  # fmt: skip
def test_keys_are_hidden(text: str, shown: str) -> None:
    assert hide_keys(text) == shown == hide_keys(shown)
    assert str(UserError(f"{text} is wrong")) == f"{shown} is wrong"


@pytest.mark.parametrize(
    "text", ["s3://bucket/a@b", "hdfs://host:8020/a@b", "/data/a:b@c", "user@host: a", "s3://bucket/a:b@c?versionId=3"]
)
def test_other_texts_stay(text: str) -> None:
    assert hide_keys(text) == text
