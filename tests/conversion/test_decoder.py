"""Tables that the families of decoders share."""

from megatron.conversion.decoder import OURS, gated, one_to_one
from megatron.conversion.tensor_mapping import hub_tensors


def test_tables() -> None:
    mapping = one_to_one({"a": "b"}) | gated(f"{OURS}.mlp", "{layer}", "gate", "up", "down")
    shapes = {
        "a": (3,),
        "decoder.layers.2.mlp.linear_fc1.weight": (2, 4, 3),
        "decoder.layers.2.mlp.linear_fc2.bias": (3,),
    }
    names = [tensor.name for tensor in hub_tensors(mapping, shapes)]
    assert names == ["b", "2.gate.weight", "2.up.weight", "2.down.bias"]
