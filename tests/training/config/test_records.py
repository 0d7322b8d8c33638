"""Rules of the flags about tensors of single steps and injected faults."""

import pytest
from support.command_lines import problems_of_config

from megatron.training.config.records import KINDS, FaultInjectorConfig, RecordsConfig


@pytest.mark.parametrize("kind", KINDS)
def test_intervals(kind: str) -> None:
    flag = f"--save-{kind.replace('_', '-')}-interval"
    field = f"save_{kind}_interval"
    assert problems_of_config(RecordsConfig, **{field: 0}) == [f"{flag} 0 must be at least 1"]
    assert RecordsConfig(**{field: 3}).interval(kind) == 3 and RecordsConfig().interval(kind) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"types": "hang,melt"}, "--fault-injector-fault-types hang,melt: melt is none of exception, hang"),
        ({"fault_delay": None}, "--fault-injector-fault-types hang: give --fault-injector-fault-delay or"),
        ({"mtti_seconds": 1.0}, "--fault-injector-fault-types hang: give --fault-injector-fault-delay or"),
        ({"num_ranks": 0}, "--fault-injector-num-ranks 0 must be at least 1"),
        ({"ranks": "1", "num_ranks": 1}, "--fault-injector-ranks 1 and --fault-injector-num-ranks 1 both say"),
        ({"ranks": "1,x"}, "--fault-injector-ranks 1,x: not whole numbers"),
        ({"ranks": "-1"}, "--fault-injector-ranks -1: ranks count from 0"),
        ({"fault_probabilities": "a"}, "--fault-injector-fault-probabilities a: not numbers"),
        ({"fault_probabilities": "1,2"}, "--fault-injector-fault-probabilities 1,2: give one weight for each"),
        ({"fault_probabilities": "0"}, "--fault-injector-fault-probabilities 0: give one weight for each"),
    ],
)
def test_impossible_faults_are_named(values: dict[str, object], problem: str) -> None:
    given = {"types": "hang", "fault_delay": 1.0, **values}
    types = {"fault_injector_fault_types": given.pop("types")}
    found = problems_of_config(FaultInjectorConfig, **types, **{f"fault_injector_{k}": v for k, v in given.items()})
    assert len(found) == 1 and found[0].startswith(problem), found


def test_possible_values_are_no_problem() -> None:
    assert problems_of_config(FaultInjectorConfig) == problems_of_config(RecordsConfig) == []
