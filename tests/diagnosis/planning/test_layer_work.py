"""The work counted from a config is the work that a micro-batch does."""

import dataclasses
import shlex
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt
from benchmarks.recorder import Recorder
from megatron.core.exceptions import UserError
from megatron.core.pipeline_parallel.stage_map import stage_map
from megatron.diagnosis.planning.layer_work import check_is_known, stage_work
from megatron.diagnosis.planning.work import STATE_PRODUCTS, Product, Selection, Work
from megatron.facades.pretrain import pretrain_config
from megatron.training.adapters import with_adapters
from megatron.training.arguments import configure
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.settings import LaunchEnvironment
from megatron.training.providers import Providers

TINY = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 2 --train-iters 1 --eval-iters 0 --num-workers 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --ffn-hidden-size 48 --attention-dropout 0 "
    "--hidden-dropout 0 "
)
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention "
    "--num-query-groups 2 --untie-embeddings-and-output-weights "
)
EXPERTS = (
    "--num-experts 4 --moe-grouped-gemm --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-layer-freq ([0]+[1]*2) "
    "--moe-token-dispatcher-type alltoall "
)
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 12 --linear-conv-kernel-dim 4 "
)
MAMBA = (
    "--is-hybrid-model --hybrid-layer-pattern M-M --mamba-num-heads 4 --mamba-head-dim 16 --mamba-state-dim 8 "
    "--mamba-num-groups 2 "
)
DSA = (
    "--experimental-attention-variant dsa --q-lora-rank 12 --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8 "
    "--dsa-indexer-topk "
)
PLAIN_LLAMA = LLAMA.replace("--group-query-attention --num-query-groups 2", "")
LATENT = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 "


def configured(flags: str, ranks: int = 1) -> PretrainConfig:
    return configure(shlex.split(flags), launch_environment=LaunchEnvironment(ranks, False))


def shapes(products: Counter[Product]) -> Counter[Product]:
    """Returns products without what the config does not decide."""
    found: Counter[Product] = Counter()
    for each, count in products.items():
        found[dataclasses.replace(each, weights=1, backward=(True, True))] += count
    return found


@pytest.mark.parametrize(
    "flags",
    [
        LLAMA,
        f"{LLAMA} --qk-layernorm",
        "",
        LLAMA + EXPERTS,
        f"{LLAMA}{EXPERTS} --moe-shared-expert-intermediate-size 24",
        f"{PLAIN_LLAMA}{EXPERTS}{LATENT}",
        LLAMA + DELTA,
        LLAMA + MAMBA,
        f"{PLAIN_LLAMA}{LATENT}{DSA} 16",
    ],
)
def test_the_work_is_that_of_a_micro_batch(flags: str) -> None:
    recorder, work = recorded_and_counted(flags)
    assert shapes(work.products) == shapes(recorder.products)
    own = work.forward_bytes + work.backward_bytes
    counted = {"norms", "residuals", "activations", "permutation", "cross entropy", "convolutions", "gates and norms"}
    assert counted & recorder.moved.keys() and "norms" in recorder.moved
    for kind in counted & recorder.moved.keys():
        # Rows that arrive have one more row as a placeholder.
        allowed = 0.03 if kind == "permutation" else 0.0
        assert own[kind] == pytest.approx(recorder.moved[kind], rel=allowed), kind
    scans = sum(6.0 * STATE_PRODUCTS[kind] * states for kind, states in work.states.items())
    assert scans == sum(count * each.flops for each, count in recorder.others.items())
    assert 3.0 * (sum(n * p.flops for p, n in work.products.items()) + _attention(work)) + scans == pytest.approx(
        recorder.flops(),
        rel=0.02,  # a query sees (length + 1) / 2 keys, and Megatron-LM counts length / 2
    )
    assert not work.selections


def recorded_and_counted(flags: str) -> tuple[Recorder, Work]:
    """Returns what a micro-batch computes, and what is counted from its config."""
    recorder, config = Recorder(), configured(TINY + flags)
    parts = pretrain_gpt.build_model, pretrain_gpt.build_datasets
    providers = Providers(*parts, lambda context: recorder.around(pretrain_gpt.build_forward_step(context)))
    with recorder.installed():
        pretrain_config(config, providers, time.monotonic())
    (stage,) = stage_map(config.transformer).stages
    return recorder, stage_work(config, stage, 128)


def test_an_indexer_selects_keys() -> None:
    """Our kernels score all keys and attend to all that a query may see; the scores and pairs of the definition, which
    are recorded, are fewer. An indexer without a loss has no backward."""
    recorder, work = recorded_and_counted(f"{PLAIN_LLAMA}{LATENT}{DSA} 5")
    assert _with_backward(work.products) == _with_backward(recorder.products)
    frozen = {(each.inputs, each.outputs): count for each, count in work.products.items() if not any(each.backward)}
    assert frozen == {(12, 24): 3, (32, 8): 3, (32, 3): 3}
    assert work.backward_bytes["norms"] + work.forward_bytes["norms"] == recorder.moved["norms"]
    assert work.selections == {Selection(32, 16, 3, 8): 3}
    (call,), (scores,) = work.attention, recorder.others
    ((recorded, count),) = recorder.attention.values()
    assert call.selects and work.attention[call] == count == 3
    row = 16 * 17 // 2, 5 * 6 // 2 + 11 * 5
    assert recorded.flops == 2 * 2 * row[1] * 4 * (12 + 8)
    assert recorder.others[scores] == 3 and scores.flops == 2 * 2 * row[0] * 3 * 8
    (selection,) = work.selections
    assert selection.flops == 2 * 32 * 16 * 3 * 8
    assert recorder.moved["choice of keys"] == 3 * 2 * 4 * sum(row)


@pytest.mark.parametrize("more", ["", EXPERTS])
def test_frozen_weights_take_no_gradients(tmp_path: Path, more: str) -> None:
    """The products of the model's own layers are those of a micro-batch with adapters, each with its backward. The two
    products of an adapter follow, and the optimizer sees the adapters alone."""
    run(configured(f"{TINY}{LLAMA}{more} --save {tmp_path}"), pretrain_gpt.build_forward_step)
    recorder = Recorder()
    config = configured(f"{TINY}{LLAMA}{more} --pretrained-checkpoint {tmp_path} --lora-rank 6")
    with recorder.installed():
        run(config, lambda context: recorder.around(pretrain_gpt.build_forward_step(context)))
    (stage,) = stage_map(config.transformer).stages
    work = stage_work(config, stage, 128)
    of_adapters = Counter(
        {each: count for each, count in work.products.items() if each.backward == (True, True) and 6 in _sides(each)}
    )
    frozen = work.products - of_adapters
    assert {each.backward for each in frozen} == {(True, False)}
    recorded = Counter({each: count for each, count in recorder.products.items() if 6 not in _sides(each)})
    assert _with_backward(frozen) == _with_backward(recorded)
    whole = stage_work(configured(f"{TINY}{LLAMA}{more}"), stage, 128)
    assert work.products.total() == whole.products.total() + 2 * 4 * 3, "four adapters of a layer"
    trained = sum(work.weights(experts, trained=True) for experts in (False, True))
    widths = (32 + 64, 32 + 32, 32 + 96, 48 + 32) if not more else None
    assert widths is None or trained == 3 * 6 * sum(widths)
    assert work.backward_bytes["embedding"] == 0 < whole.backward_bytes["embedding"]
    assert work.forward_bytes["adapters"] > 0


def run(config: PretrainConfig, build_forward_step: Callable[..., Any]) -> None:
    parts = pretrain_gpt.build_model, pretrain_gpt.build_datasets
    providers = with_adapters(config, Providers(*parts, build_forward_step))
    pretrain_config(config, providers, time.monotonic())


def _sides(each: Product) -> tuple[int, int]:
    return each.inputs, each.outputs


def _with_backward(products: Counter[Product]) -> Counter[Product]:
    found: Counter[Product] = Counter()
    for each, count in products.items():
        found[dataclasses.replace(each, weights=1)] += count
    return found


def _attention(work) -> float:
    return sum(count * each.flops for each, count in work.attention.items())


def test_ranks_share_the_work() -> None:
    flags = TINY.replace("--vocab-size 127", "--vocab-size 255") + LLAMA + EXPERTS
    alone = configured(flags)
    (stage,) = stage_map(alone.transformer).stages
    whole = stage_work(alone, stage, 256)
    split = configured(
        f"{flags} --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1",
        2,
    )
    part = stage_work(split, stage, 256)
    flops = [sum(n * p.flops for p, n in work.products.items()) for work in (whole, part)]
    moved = [work.forward_bytes.total() + work.backward_bytes.total() for work in (whole, part)]
    assert flops[0] == 2 * flops[1] and moved[0] == pytest.approx(2 * moved[1], rel=0.02)
    assert whole.weights(experts=True) == 2 * part.weights(experts=True)
    context = configured(f"{flags} --context-parallel-size 2", 2)
    half = stage_work(context, stage, 256)
    assert _attention(whole) == 2 * _attention(half)


def test_documents_that_are_kept_apart_have_fewer_pairs() -> None:
    config = configured(TINY + LLAMA)
    (stage,) = stage_map(config.transformer).stages
    assert 2 * _attention(stage_work(config, stage, 128, document_tokens=8)) == _attention(
        stage_work(config, stage, 128)
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{LLAMA} --optimizer muon --tensor-model-parallel-size 2", "--optimizer muon: the time of its products"),
        (
            f"{PLAIN_LLAMA}{LATENT}{DSA} 5 --context-parallel-size 2",
            "--context-parallel-size 2: the time of sparse attention",
        ),
        (
            f"{PLAIN_LLAMA}{LATENT}{DSA} 5 --tensor-model-parallel-size 2 --dsa-indexer-loss-coeff 0.1",
            "--dsa-indexer-loss-coeff 0.1: the time of the indexer's loss",
        ),
    ],
)
def test_unknown_work_is_refused(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_is_known(configured(f"{TINY} {flags}", ranks=2))


def test_products_know_their_type() -> None:
    (stage,) = stage_map(configured(TINY).transformer).stages
    half = configured(f"{TINY} --bf16 --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16")
    products = stage_work(half, stage, 128).products
    assert {each.dtype for each in products} == {torch.bfloat16}
    assert sum(count for each, count in products.items() if each.fp8) == 4  # of the layer in the middle
