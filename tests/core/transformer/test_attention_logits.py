"""The largest attention logits, and QK-Clip: the formulas in one process, and the same numbers in every layout."""

from pathlib import Path

import pytest
import torch
from support.runs import TINY, Outcome, differences, logger_of, state_at_end, train, train_all_on_ranks

from megatron.core.dist_checkpointing.chunk import MASTER, optimizer_state_name
from megatron.core.exceptions import UserError
from megatron.core.initializers import Constant
from megatron.core.optimizer.state_storage import split_float32
from megatron.core.parameters import declare
from megatron.core.transformer.attention_logits import rows_of
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.training.trainer import Trainer

BASE = f"{TINY} --mock-data --fp64 --num-layers 4 --num-attention-heads 4 --micro-batch-size 2 --init-method-std 0.2"
GROUPED = "--group-query-attention --num-query-groups 2"
LATENT = (
    "--multi-latent-attention --q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 "
    "--position-embedding-type rope --qk-layernorm --normalization RMSNorm --disable-bias-linear"
)
CLIP = "--qk-clip --qk-clip-threshold 0.02 --qk-clip-alpha 0.3"
TP2, CP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--context-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
VPP = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
A2A = "--cp-comm-type a2a"
MUON = "--optimizer muon"
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
ZERO3 = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"


def logits_of(outcome: Outcome) -> list[float]:
    return [step.max_attention_logit for step in outcome.steps]


def run_and_watch(flags: str) -> tuple[Outcome, dict[int, torch.Tensor]]:
    """Returns a run of one step that changes no weight but by the clip, and the largest logit of each head of each
    layer, computed from the queries and keys that its attention was called with."""
    seen: dict[int, torch.Tensor] = {}

    def watch(run: Trainer) -> None:
        for module in run.model[0].modules():
            if isinstance(module, DotProductAttention):
                module.register_forward_pre_hook(note)

    def note(module: DotProductAttention, arguments: tuple[torch.Tensor, ...]) -> None:
        query, key = (tensor.detach() for tensor in arguments[:2])
        key = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
        scores = module.variant.scale * torch.einsum("qbad,kbad->baqk", query, key)
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        found = scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3))
        seen[module.layer_number] = torch.maximum(seen.get(module.layer_number, found), found)

    outcome = train(f"{flags} --train-iters 1 --lr 0 --min-lr 0", base=BASE, before=watch)
    return outcome, seen


def ratios(outcome: Outcome, name: str, columns: int, *rows: int) -> torch.Tensor:
    """Returns the factor of each row of a weight, in the shape of its rows."""
    before, after = outcome.at_start[f"weight {name}"], outcome.at_end[f"weight {name}"]
    ratio = (after / before).view(*rows, columns)
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))
    return ratio[..., 0]


@pytest.mark.fast("4-", "2---attention-output-gate")
@pytest.mark.parametrize("gate", ["", "--attention-output-gate"])
@pytest.mark.parametrize("groups", [4, 2])
def test_self_attention_is_scaled_by_head_or_group(groups: int, gate: str) -> None:
    flags = f"--group-query-attention --num-query-groups {groups} {gate} --add-qkv-bias --recompute-granularity full"
    flags += " --recompute-method uniform --recompute-num-layers 1"
    outcome, logits = run_and_watch(f"{CLIP} {flags}")
    heads, clipped = 4 // groups, 0
    assert logits_of(outcome) == pytest.approx([max(float(of_layer.max()) for of_layer in logits.values())], rel=1e-12)
    for layer in range(4):
        found = ratios(outcome, f"decoder.layers.{layer}.self_attention.linear_qkv.weight", 32, groups, -1, 8)
        for group in range(groups):
            largest = float(logits[layer + 1][group * heads : (group + 1) * heads].max())
            factor = min(1.0, 0.02 / largest) if largest > 0 else 1.0
            clipped += factor < 1.0
            wanted = [factor**0.3] * heads + [1.0] * (heads if gate else 0) + [factor**0.7, 1.0]
            torch.testing.assert_close(found[group], torch.tensor(wanted).double()[:, None].expand(-1, 8))
    assert clipped


def test_latent_attention_keeps_the_shared_keys() -> None:
    """Channels without positions share the factor, rotary queries take all of it (Kimi K2, algorithm 1)."""
    outcome, logits = run_and_watch(f"{CLIP} {LATENT}")
    for layer in range(4):
        name = f"decoder.layers.{layer}.self_attention."
        factor = torch.where(logits[layer + 1] > 0.02, 0.02 / logits[layer + 1], 1.0)[:, None]
        assert (factor < 1).any()
        query, key_value = (ratios(outcome, f"{name}linear_{part}_up_proj.weight", 8, 4, -1) for part in ("q", "kv"))
        torch.testing.assert_close(query[:, :8], (factor**0.3).expand(-1, 8))
        torch.testing.assert_close(query[:, 8:], factor.expand(-1, 4))
        torch.testing.assert_close(key_value[:, :8], (factor**0.7).expand(-1, 8))
        torch.testing.assert_close(key_value[:, 8:], torch.ones(4, 8).double())
        down = f"weight {name}linear_kv_down_proj.weight"
        assert torch.equal(outcome.at_start[down], outcome.at_end[down])


def test_the_logits_after_a_clip_are_at_the_threshold() -> None:
    outcome = train(f"{CLIP} {LATENT} --train-iters 2 --lr 0 --min-lr 0 --eval-iters 1 --eval-interval 1", base=BASE)
    assert logits_of(outcome)[0] > 0.02
    flags = "--qk-clip --qk-clip-threshold 1e9"
    assert expected(f"{flags} {LATENT} {RUN}").losses == expected(f"--log-max-attention-logit {LATENT} {RUN}").losses


def check_layouts(runs: list[tuple[str, str]], world_size: int) -> None:
    """Each run of a model and a layout has the logits and weights of one process."""
    by_rank = train_all_on_ranks([f"{model} {layout}" for model, layout in runs], world_size, base=BASE)
    for number, (model, layout) in enumerate(runs):
        alone, ranks = expected(model), [outcomes[number] for outcomes in by_rank]
        assert min(logits_of(alone)) > 0.02  # the clip scales weights in every step
        assert logits_of(logger_of(ranks)) == pytest.approx(logits_of(alone), rel=1e-9), layout
        end, wanted = state_at_end(ranks), state_at_end([alone])
        assert max(float((end[name] - wanted[name]).abs().max()) for name in wanted) < 1e-9, layout


_RUNS: dict[str, Outcome] = {}


def expected(flags: str) -> Outcome:
    if flags not in _RUNS:
        _RUNS[flags] = train(flags, base=BASE)
    return _RUNS[flags]


RUN = "--train-iters 3"
ONE_GROUP = "--group-query-attention --num-query-groups 1 --num-layers 3 --train-iters 2"
MODELS = {"grouped": f"{CLIP} {GROUPED} {RUN}", "latent": f"{CLIP} {LATENT} {RUN}"}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_clips_like_one_process(model: str) -> None:
    layouts = [TP2, CP2, f"{CP2} {A2A}", PP2, VPP, ZERO1, ZERO3, "", MUON]
    check_layouts([(MODELS[model] + (f" {MUON}" if layout is MUON else ""), layout) for layout in layouts], 2)
    four = [f"{TP2} {CP2}", f"{TP2} {PP2} {ZERO1}", f"{TP2} {ZERO3}", "--tensor-model-parallel-size 4"]
    check_layouts([(MODELS[model], layout) for layout in four], 4)


@pytest.mark.slow
def test_two_ranks_that_share_keys_clip_like_one_process() -> None:
    check_layouts([(f"{CLIP} {ONE_GROUP}", TP2)], 2)


def test_nothing_is_measured_without_the_flags() -> None:
    run = expected(RUN)
    assert logits_of(run) == [None] * 3


def test_a_norm_of_heads_is_refused() -> None:
    with pytest.raises(UserError, match="--qk-clip scales weights, and --qk-layernorm removes their scale again"):
        train("--qk-clip --qk-layernorm", base=BASE)
    with pytest.raises(UserError, match=r"--qk-clip-alpha 2\.0 must be from 0 to 1"):
        train("--qk-clip --qk-clip-alpha 2", base=BASE)


@pytest.mark.slow_cases("")
@pytest.mark.parametrize("storage", ["", "--use-precision-aware-optimizer"])
def test_bf16_weights_and_a_resumed_run(tmp_path: Path, storage: str) -> None:
    """The clip scales the main weights and the model's alike; a resumed run equals one that was not interrupted."""
    base = BASE.replace("--fp64", "--bf16")
    flags = f"{CLIP} {GROUPED} --use-distributed-optimizer {storage} --train-iters 4"
    whole = train(flags, base=base)
    assert min(logits_of(whole)) > 0.02
    train(f"{flags} --exit-interval 2 --save {tmp_path}", base=base)
    resumed = train(f"{flags} --load {tmp_path}", base=base)
    assert differences(whole.at_end, resumed.at_end) == []
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    main, weight = whole.at_end[optimizer_state_name(MASTER, name)], whole.at_end[f"weight {name}"]
    assert torch.equal(split_float32(main.flatten())[0], weight.flatten())


def test_projections_in_fp8_have_parameters_without_rows() -> None:
    """The history of the largest values (--fp8-recipe delayed) is a parameter of the projection and is not scaled."""
    base = BASE.replace("--fp64", "--bf16")
    outcome = train(f"{CLIP} --fp8-format hybrid --fp8-recipe delayed --train-iters 1 --lr 0 --min-lr 0", base=base)
    name = "decoder.layers.0.self_attention.linear_qkv"
    history, weight = (f"weight {name}.{each}" for each in ("linear.scaling.amax_history", "weight"))
    assert outcome.at_end[history].count_nonzero()
    assert not torch.equal(outcome.at_start[weight], outcome.at_end[weight])


def test_heads_that_are_not_known_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(8, 4))
    declare(parameter, Constant(0.0))
    with pytest.raises(UserError, match=r"has the shape .8, 4., and its heads are not known"):
        rows_of(parameter, torch.ones(2, 4))
