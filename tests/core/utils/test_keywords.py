"""Keywords that functions and classes of scripts take."""

import functools

from torch import nn

from megatron.core.utils.keywords import Keywords


def test_a_function_gets_the_keywords_that_it_takes() -> None:
    offered = {"pre_process": True, "vp_stage": 1}
    assert Keywords.of(lambda pre_process: None).chosen_from(offered) == {"pre_process": True}
    assert Keywords.of(lambda **anything: None).chosen_from(offered) == offered
    bound = functools.partial(lambda builder, vp_stage: None, "builder")
    assert Keywords.of(bound).chosen_from(offered) == {"vp_stage": 1}
    assert "timers" in Keywords.of(lambda **anything: None) and "timers" not in Keywords.of(lambda pre_process: None)


def test_a_constructor_takes_what_it_passes_on() -> None:
    class Base(nn.Module):
        def __init__(self, config: object, backend: object = None) -> None: ...

        def forward(self, hidden: object, inputs: object) -> None: ...

    class Script(Base):
        def __init__(self, *args: object, width: int = 1, **kwargs: object) -> None: ...

    assert {"width", "config", "backend"} <= Keywords.of_constructor(Script).names
    assert "vp_stage" not in Keywords.of_constructor(Script)
    assert Keywords.of_forward(Script) is Keywords.of_forward(Script)
    assert "inputs" in Keywords.of_forward(Script) and "attention_mask" not in Keywords.of_forward(Script)
