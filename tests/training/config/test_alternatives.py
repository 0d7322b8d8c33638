"""Flags that replace each other exist, and none replaces itself."""

from megatron.training.config.alternatives import SAME_THING
from megatron.training.config.flag_table import flag_table


def test_they_are_fields_and_others() -> None:
    named = {*SAME_THING, *(other for others in SAME_THING.values() for other in others)}
    assert named <= flag_table().keys()
    assert not [field for field, others in SAME_THING.items() if field in others]
    assert "geglu" in SAME_THING["swiglu"] and "swiglu" in SAME_THING["geglu"]
