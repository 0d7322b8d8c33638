"""Settings of NCCL communicators by group: the YAML file of --nccl-communicator-config-path."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron.core.exceptions import UserError
from megatron.core.utils.yaml_files import read_yaml

CommunicatorSettings = Mapping[str, Mapping[str, Any]]
"""Settings by group name, such as {"dp": {"max_ctas": 8}}."""

_FLAG = "--nccl-communicator-config-path"
_NUMBER = (lambda value: type(value) is int and value >= 1, "a whole number of at least 1")
_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "min_ctas": _NUMBER,
    "max_ctas": _NUMBER,
    "cga_cluster_size": (lambda value: type(value) is int and 0 <= value <= 8, "a whole number from 0 to 8"),
    "net_name": (lambda value: isinstance(value, str), "the name of a network plugin"),
    "is_high_priority_stream": (lambda value: isinstance(value, bool), "true or false"),
}
"""Settings of a communicator, a test of the value, and the values that work."""

_MOST_CTAS = 32
"""NCCL's largest number without a setting, on most machines."""

_OTHER_NAMES = {"ep_dp": "expt_dp", "ep_tp": "expt_tp", "exp": "ep", "tp_exp": "tp_ep", "mp_exp": "tp_ep_pp"}
_OTHER_NAMES |= {"dp_modulo_exp": "expt_dp", "tp_ep_mp": "tp_ep_pp", "intra_ep_dp": "intra_expt_dp"}
"""Names of groups in older releases of Megatron-LM, and today's."""


def read_communicator_settings(path: str, groups: Iterable[str]) -> CommunicatorSettings:
    """Returns the settings of a YAML file for the groups of these names. Raises UserError naming the file, the group
    and the setting that is wrong."""
    content, names, settings = read_yaml(path, _FLAG), sorted(groups), {}
    if not isinstance(content, dict):
        raise UserError(f"{_FLAG} {path}: expected groups and their settings, such as dp: {{max_ctas: 8}}")
    for given, table in content.items():
        group = _OTHER_NAMES.get(given, given)
        if group not in names:
            raise UserError(f"{_FLAG} {path}: {given}: no such group; the groups are {', '.join(names)}")
        if not isinstance(table, dict):
            raise UserError(f"{_FLAG} {path}: {given}: expected settings, such as {{max_ctas: 8}}")
        for name, value in table.items():
            if name not in _KINDS:
                raise UserError(f"{_FLAG} {path}: {given}: {name}: no such setting; choose from {', '.join(_KINDS)}")
            fits, works = _KINDS[name]
            if not fits(value):
                raise UserError(f"{_FLAG} {path}: {given}: {name} {value}: expected {works}")
        if table.get("min_ctas", 1) > table.get("max_ctas", table.get("min_ctas", 1)):
            raise UserError(f"{_FLAG} {path}: {given}: min_ctas {table['min_ctas']} is above max_ctas")
        settings[group] = dict(table)
        if "min_ctas" in table:  # NCCL refuses a smallest number without a largest one
            settings[group].setdefault("max_ctas", max(table["min_ctas"], _MOST_CTAS))
    return settings
