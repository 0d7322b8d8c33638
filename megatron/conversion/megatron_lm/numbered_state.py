"""Optimizer state of the format torch_dcp, whose names have the number of a parameter: `optimizer.state.3.exp_avg`.

Numbers count the parameters of a group in the order of the module, which `.metadata` keeps, and then those of the next
group. A run of fewer bits has `optimizer.optimizer.state.3.exp_avg`, and its main weights by group and place in it, as
`optimizer.fp32_from_fp16_params.0.3`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from megatron.conversion.megatron_lm.legacy_optimizer import RankParameter, plain_states
from megatron.conversion.megatron_lm.names import SourceTensor
from megatron.conversion.megatron_lm.state_dict import FittedTensor, StateTensor, in_our_order
from megatron.conversion.megatron_lm.torch_dist import DistFolder
from megatron.core.exceptions import UserError

_CHAIN = r"optimizer\.(?:(?P<optimizer>\d+)\.)?"
_STATE = re.compile(rf"{_CHAIN}(?:optimizer\.)?state\.(?P<number>\d+)\.(?P<kind>exp_avg|exp_avg_sq)")
_MASTER = re.compile(rf"{_CHAIN}fp32_from_fp16_params\.(?P<group>\d+)\.(?P<place>\d+)")
_GROUP = re.compile(
    rf"{_CHAIN}(?:optimizer\.)?param_groups\.(?P<group>\d+)\.(?P<key>params|wd_mult|is_expert_parallel)"
)


def is_numbered(name: str) -> bool:
    """Whether a tensor is optimizer state of a parameter with a number."""
    return _STATE.fullmatch(name) is not None or _MASTER.fullmatch(name) is not None


def numbered_states(
    folder: DistFolder,
    tensors: Mapping[str, StateTensor],
    fitted: Sequence[FittedTensor],
    weights: Mapping[str, StateTensor],
) -> Iterator[tuple[FittedTensor, str, SourceTensor]]:
    """Yields the weight, kind and elements of each state. `tensors` are the numbered ones; `weights` is the state dict
    of the module in its order, and `fitted` has its tensors. Raises UserError for groups of another size than the
    model's, for other shapes and for main weights that do not round to the weights at their places."""
    order = {name: place for place, name in enumerate(weights)}
    parameters: list[tuple[int, RankParameter]] = []
    by_key = {one.tensor.local_name: one for one in fitted}
    for key, one in by_key.items():
        shape = one.shape if len(one.names) == 1 else one.shape[1:]
        for name in one.names if not one.tensor.name.endswith("expert_bias") else ():
            values = SourceTensor(one.values.dtype, weights[name].read)
            parameters.append((order[name], RankParameter(key, one.tensor, values, shape)))
    saved = _saved(folder, tensors)
    ordered = [parameter for _, parameter in sorted(parameters, key=lambda item: item[0])]
    for key, kind, values in plain_states(saved, ordered, folder.path):
        one = by_key[key]
        yield one, kind, values if one.order is None else in_our_order(values, one.order)


def _saved(folder: DistFolder, tensors: Mapping[str, StateTensor]) -> list[dict[str, object]]:
    """Returns the state dict of each optimizer, as a file of the legacy format has them."""
    states: dict[int, dict[int, dict[str, StateTensor]]] = {}
    masters: dict[int, dict[int, dict[int, StateTensor]]] = {}
    groups: dict[int, dict[int, dict[str, object]]] = {}
    for name, tensor in tensors.items():
        if (found := _STATE.fullmatch(name)) is not None:
            of_number = states.setdefault(int(found["optimizer"] or 0), {}).setdefault(int(found["number"]), {})
            of_number[found["kind"]] = tensor
        elif (found := _MASTER.fullmatch(name)) is not None:
            of_group = masters.setdefault(int(found["optimizer"] or 0), {}).setdefault(int(found["group"]), {})
            of_group[int(found["place"])] = tensor
    for name in folder.objects:
        if (found := _GROUP.fullmatch(name)) is not None:
            settings = groups.setdefault(int(found["optimizer"] or 0), {}).setdefault(
                int(found["group"]), {"params": []}
            )
            settings[found["key"]] = folder.object(name)
    for at, of_optimizer in states.items():
        grouped = [settings["params"] for settings in groups.get(at, {}).values()]
        listed = {number for numbers in grouped if isinstance(numbers, list) for number in numbers}
        if of_optimizer.keys() - listed:
            raise UserError(
                f"{folder.path}: optimizer state of parameter {min(of_optimizer.keys() - listed)}, which is in no "
                "optimizer.param_groups; import with --no-load-optim"
            )
    return [
        {
            "optimizer": {"state": state, "param_groups": [groups[at][group] for group in sorted(groups.get(at, {}))]},
            "fp32_from_fp16_params": [
                [masters[at][group][place] for place in sorted(masters[at].get(group, {}))]
                for group in (sorted(groups.get(at, {})) if at in masters else ())
            ],
        }
        for at, state in sorted(states.items())
    ]
