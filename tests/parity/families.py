"""Families of models, and the layouts that each family is tested in."""

from dataclasses import dataclass, field
from functools import cached_property

from parity.layouts import DIMENSIONS, FURTHER, Choice, choice, layout
from parity.model_list import (
    BERT,
    DENSE,
    EXPERTS,
    HETEROGENEOUS,
    HYBRIDS,
    LATENT,
    MIXERS,
    MODEL_OPTIONS,
    PREDICTING,
    T5,
)
from parity.models import Model


@dataclass(frozen=True)
class Family:
    """Models, the values whose pairs they are tested with, and further layouts."""

    name: str
    models: list[Model]
    dimensions: dict[str, list[Choice]]
    """Values of each dimension. The first one is the absence of this kind of parallelism."""
    centres: tuple[str, ...] = ()
    """Only pairs with a value of one of these dimensions are covered; empty: all pairs."""
    alike: tuple[str, ...] = ()
    """Values that do nearly what others do. `make test` combines them with the first model only, apart from further
    layouts; `make test-all` covers their pairs too."""
    further: list[tuple[str, ...]] = field(default_factory=list)
    """Further layouts, given by the names of their values. `make test-all` tests all models in them; `make test` tests
    one model in those of up to four ranks that have a value which its other cells lack."""
    eight: list[tuple[str, ...]] = field(default_factory=list)
    """Layouts of eight ranks, tested with one model in `make test` and with all models in `make test-all`."""
    rare: list[tuple[str, ...]] = field(default_factory=list)
    """Slow layouts, tested only in `make test-all`."""

    def wants(self, one: str, other: str) -> bool:
        """Tells whether pairs of values of these two dimensions are to be covered."""
        return not self.centres or one in self.centres or other in self.centres

    def wants_pair(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        """Tells whether a pair of (dimension, value) is to be covered. With centres, a pair with an absent kind of
        parallelism need not be."""
        if not self.centres:
            return True
        return self.wants(one[0], other[0]) and one not in self._nothing and other not in self._nothing

    def is_quick(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        """Tells whether `make test` covers this pair of (dimension, value), which the family wants: two ways to split,
        or a model and a split of its tensors. `make test-all` covers the pairs with a loss or with recomputation too.
        """
        dimensions = {one[0], other[0]}
        if dimensions & {"loss", "recompute"} or ("model" in dimensions and "tensor" not in dimensions):
            return False
        beside = {one[1], other[1]} - set(self.alike)
        return len(beside) == 2 or beside == {self.models[0].name}

    @cached_property
    def _nothing(self) -> set[tuple[str, str]]:
        return {(dimension, values[0].name) for dimension, values in self.dimensions.items()}

    def __hash__(self) -> int:
        return hash(self.name)


def _values(**names: str) -> dict[str, list[Choice]]:
    """Returns for each dimension its first value (absent) and the named ones."""
    return {d: [choices[0], *map(choice, names.get(d, "").split())] for d, choices in DIMENSIONS.items()}


def _suits(value: Choice, models: list[Model]) -> bool:
    return any(layout(value.name).misfit(model) is None for model in models)


def _cells(words: str) -> list[tuple[str, ...]]:
    """Returns layouts, each a tuple of its ways to split, from words such as `sp2+pp2`."""
    return [tuple(word.split("+")) for word in words.split()]


_NOT_FOR_ALL = "experts"

_PLAIN = Family(
    "dense models",
    DENSE,
    {name: choices[:1] if name == _NOT_FOR_ALL else choices for name, choices in DIMENSIONS.items()},
    # sp2 without its split of tokens; stages of other sizes than those of pp2; a schedule that zb-v and further layouts
    # with zb-h1 stand for; another exchange of the keys that p2p moves; parts of optim_grads_params.
    alike=("tp2", "pp2-uneven", "pp2-zb-h1", "cp2-a2a", "dp2", "dp2-optim_grads"),
    further=[
        *((value.name,) for choices in FURTHER.values() for value in choices if _suits(value, DENSE)),
        *_cells(
            "tp2+pp2-interleaved+cp2-a2a sp2+pp2-zb-h1+cp2-a2a tp2+cp4-a2a sp4+pp2-zb-v "
            "pp4-layout+dp2-optim_grads_params tp2+dp4-optim pp4+cp2-p2p sp2+pp4-zb-h1 sp2+cp2-p2p+recompute-all-parts "
            "pp2-zb-h1+dp2-optim_grads_params+recompute-all-parts tp2+dp2-optim_grads_params+recompute-norms "
            "pp4-zb-v+dp2-optim_grads sp2-pieces+pp2-zb-h1+recompute-full tp2+pp2+dp2+pp-before-dp "
            "cp2-dynamic+dp2-optim cp1-dynamic+dp4-average sp2+cp2-dynamic+recompute-full"
        ),
    ],
    eight=_cells(
        "sp2+pp2+cp2-p2p sp2+cp2-a2a+dp2-optim_grads_params cp2-p2p+pp2+dp2-optim+pp-before-dp "
        "sp2+dp4-hybrid pp2-interleaved+dp4-hybrid cp2-by-layer+dp4-hybrid"
    ),
    rare=_cells(
        "pp8-layout dp8-hybrid sp2+cp4-levels tp4+cp2-p2p pp2-zb-v+cp4-p2p pp2-variable+sp2+cp2-a2a "
        "sp2+pp2-interleaved+offload pp2-zb-h1+dp2-optim_grads_params+offload "
        "sp2-pieces+cp2-p2p+dp2-optim_grads_params sp2-pieces+pp2-interleaved+recompute-all-parts "
        "sp2+cp2-dynamic+dp2"
    ),
)

_MODEL_OPTIONS = Family(
    "model options",
    MODEL_OPTIONS,
    _values(
        tensor="tp2 sp2",
        pipeline="pp2",
        context="cp2-p2p cp2-a2a",
        recompute="recompute-full recompute-core",
    ),
    centres=("model",),
    alike=("tp2",),
    rare=_cells("cp2-dynamic+dp2 sp2+cp2-dynamic"),
)

_LATENT = Family(
    "latent attention",
    LATENT,
    _values(
        tensor="tp2 sp2",
        pipeline="pp2 pp2-zb-h1",
        context="cp2-p2p cp2-a2a",
        data="dp2-optim_grads_params",
        recompute="recompute-full recompute-core",
    ),
    centres=("model",),
    alike=("tp2",),
    further=_cells("sp2+recompute-all-parts tp2+cp2-a2a+recompute-latents"),
    rare=_cells("sp2+cp4-levels"),
)

_EXPERTS = Family(
    "experts",
    EXPERTS,
    _values(
        tensor="sp2",
        pipeline="pp2 pp2-interleaved pp2-zb-v",
        context="cp2-p2p cp2-a2a",
        data="dp2 dp2-optim_grads_params dp4-hybrid",
        recompute="recompute-full",
        experts="ep2 ep4-etp1 ep2-etp1 etp2",
    ),
    centres=("model", "experts"),
    alike=("pp2-interleaved", "dp4-hybrid", "cp2-a2a"),
    further=_cells(
        "dp4-hybrid+ep2 dp4-hybrid+ep2-etp1 sp2+dp2+ep2-etp2 pp2-interleaved+dp2+ep2-late sp2+pp2+dp2+ep2 "
        "sp2+pp2+dp2-optim+ep2-etp1 sp2+pp2-interleaved+dp2-optim_grads+ep4-etp1 sp4+ep2-etp1 "
        "pp4-layout+dp2-optim_grads_params+ep2 pp2-uneven+dp2+ep2 dp4-average+ep2 sp2+ep2-etp1+recompute-moe "
        "dp2-optim_grads_params+ep2+recompute-experts dp2+ep2-late+recompute-shared cp2-p2p+ep2+recompute-moe "
        "dp2+ep2-late pp2+dp2+ep2+offload-experts pp2-interleaved+dp2-optim_grads_params+ep2-late "
        "dp2-optim_grads_params+ep2-flex+recompute-experts dp2-optim_grads_params+ep2-late+recompute-experts"
    ),
    eight=_cells("cp2-p2p+dp4-optim_grads+ep8-etp1 sp2+pp2+dp2+ep2-etp1+pp-before-dp"),
    rare=_cells(
        "dp8-optim_grads_params+ep2-etp2 sp2+pp2-zb-h1+cp2-a2a+ep2 sp4+dp2+ep2-etp2 "
        "cp2-p2p+pp2+dp2-optim+ep2-etp1+pp-before-dp sp2+cp2-p2p+recompute-full+ep2-late "
        "sp2+pp2-zb-h1+dp2-optim+ep2-flex sp2+cp2-p2p+recompute-moe+ep2-flex sp2+pp2-zb-h1+dp2-optim+ep2-late "
        "sp2+cp2-p2p+recompute-moe+ep2-late "
        "pp2-interleaved+dp2-optim_grads_params+ep2-late+offload-experts sp2-pieces+dp2+ep2-late"
    ),
)

_PREDICTING = Family(
    "multi-token prediction",
    PREDICTING,
    _values(
        tensor="tp2 sp2",
        pipeline="pp2 pp2-interleaved pp2-zb-v",
        context="cp2-p2p cp2-a2a",
        data="dp2-optim_grads_params",
        recompute="recompute-full",
        experts="ep2",
    ),
    centres=("model",),
    alike=("tp2", "pp2-interleaved", "cp2-a2a"),
    further=_cells(
        "pp4-apart pp2-apart pp2-apart-and-behind+sp2 pp2-zb-h1+dp2-optim_grads_params pp4-apart+cp2-p2p "
        "pp2-zb-h1+dp2-optim_grads sp2+recompute-latents dp2+ep2+recompute-shared"
    ),
    rare=_cells("sp2+pp2+dp2+ep2 sp2+cp4-levels"),
)

_MIXERS = Family(
    "other token mixers",
    MIXERS,
    _values(
        tensor="tp2 sp2",
        pipeline="pp2",
        context="cp2-p2p",
        data="dp2-optim_grads_params",
        recompute="recompute-full recompute-core",
    ),
    centres=("model",),
    further=_cells("sp2+recompute-all-parts tp2+pp2-zb-h1 sp2+dp2-optim sp2+cp2-a2a"),
    rare=_cells("tp4+pp2-interleaved sp2+pp2+dp2-optim_grads_params"),
)

_BERT = Family(
    "BERT",
    BERT,
    _values(
        tensor="tp2 sp2",
        pipeline="pp2 pp2-interleaved pp2-zb-v",
        data="dp2-optim_grads_params",
        recompute="recompute-full recompute-core",
    ),
    centres=("model",),
    alike=("tp2",),
    further=_cells(
        "sp2+pp2-zb-h1 pp2+dp2-optim tp2+dp2-optim_grads sp2+pp2+dp2-optim pp4-layout+dp2-optim_grads "
        "tp4+recompute-all-parts"
    ),
    rare=_cells("sp4+dp2-optim_grads_params dp4-hybrid+pp2"),
)

_T5 = Family(
    "T5",
    T5,
    _values(
        tensor="tp2 sp2",
        pipeline="pp2 pp2-zb-h1",
        data="dp2-optim_grads_params",
        recompute="recompute-full recompute-core",
    ),
    centres=("model",),
    alike=("tp2",),
    further=_cells(
        "tp2+dp2-optim pp2+dp2-optim_grads tp2-spread pp4-split+dp2-optim pp3-two-stacks pp2-auto sp2+pp4-split "
        "pp4-split+recompute-all-parts dp2-optim_grads_params+recompute-full sp4+dp2-optim_grads "
        "sp2+pp2+dp2-optim_grads"
    ),
)

_HYBRIDS = Family(
    "hybrids",
    HYBRIDS,
    _values(
        tensor="tp2 sp2",
        pipeline="pp2",
        context="cp2-p2p",
        data="dp2-optim_grads_params",
        recompute="recompute-full recompute-core",
        experts="ep2",
    ),
    centres=("model",),
    rare=_cells("sp2+cp2-a2a pp2-auto+recompute-all-parts"),
)

_HETEROGENEOUS = Family(
    "heterogeneous layers",
    HETEROGENEOUS,
    _values(tensor="tp2 sp2", pipeline="pp2-auto", context="cp2-a2a", recompute="recompute-core"),
    centres=("model",),
    further=_cells("sp2+pp2-auto tp2+cp2-a2a+recompute-core"),
    rare=_cells("pp4+dp2-optim dp2-optim_grads_params+recompute-full sp2+cp2-p2p+recompute-all-parts tp4+pp2-zb-h1"),
)

FAMILIES = [_PLAIN, _MODEL_OPTIONS, _LATENT, _EXPERTS, _PREDICTING, _MIXERS, _HYBRIDS, _HETEROGENEOUS, _BERT, _T5]
