"""Notes about flags that have no effect beside certain values of others."""

import pytest
from support.command_lines import SMALL, configured, problems_of, without

from megatron.training.arguments import configure
from megatron.training.config.settings import LaunchEnvironment

ONE_PROCESS = LaunchEnvironment(1, False)


def notes_about(flag: str, flags: str, base: str = SMALL, ranks: int = 1) -> list[str]:
    return [note for note in configured(flags, base=base, ranks=ranks).notes if note.startswith(f"{flag} ")]


def test_what_hides_exchanges_says_where_there_are_none() -> None:
    def said(flags: str, ranks: int = 1) -> list[str]:
        notes = configured(f"--num-experts 4 {flags}", ranks=ranks).notes
        return [note.partition(":")[0] for note in notes if "has no effect with --expert-model-parallel-size 1" in note]

    shared = "--moe-shared-expert-overlap"
    both = f"--delay-wgrad-compute {shared} --moe-shared-expert-intermediate-size 64"
    assert said(both) == [shared, "--delay-wgrad-compute"]
    assert said(f"{both} --expert-model-parallel-size 2", ranks=2) == said("") == said(shared) == []
    assert said(f"{both} --expert-tensor-parallel-size 2", ranks=2) == [shared]  # an expert's channels are elsewhere
    assert said(f"{both} --tensor-model-parallel-size 2 --sequence-parallel", ranks=2) == [shared]


def test_pieces_say_which_layers_have_none() -> None:
    def said(flags: str) -> list[str]:
        flags = f"--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap {flags}"
        return [note for note in configured(flags, ranks=2).notes if note.startswith("--tp-comm-overlap")]

    assert said("") == said("--tp-comm-overlap-transport process-group --tp-comm-overlap-rs-dgrad") == []
    (note,) = said("--fp8-format hybrid --fp8-recipe delayed")
    assert note.startswith("--tp-comm-overlap: products in fp8 are not cut, since a scale needs the largest value")


def test_weights_in_mxfp8_are_not_gathered_in_it() -> None:
    def said(recipe: str) -> list[str]:
        flags = f"--fp8-param-gather --use-distributed-optimizer --fp8-format e4m3 --fp8-recipe {recipe}"
        return [note for note in configured(flags).notes if note.startswith("--fp8-param-gather")]

    assert said("tensorwise") == []
    (note,) = said("mxfp8")
    assert note.startswith("--fp8-param-gather: has no effect with --fp8-recipe mxfp8, where a weight and its trans")


def test_gathered_keys_travel_by_the_ring() -> None:
    def said(words: str, ranks: int = 2) -> list[str]:
        flags = f"--context-parallel-size {ranks} --cp-comm-type {words}"
        return [note for note in configured(flags, ranks=ranks).notes if "the ring of p2p computes" in note]

    assert said("p2p") == said("p2p a2a") == said("all_gather", ranks=1) == []
    for words in ("all_gather", "p2p all_gather"):
        (note,) = said(words)
        assert note.startswith(f"--cp-comm-type {words}: "), note


def test_a_split_that_nothing_reads() -> None:
    made_up = "--split 9,1,0: has no effect with --mock-data, which makes up data for training, validation and test"
    assert notes_about("--split", "--split 9,1,0") == [made_up]
    assert notes_about("--split", "") == []
    base = without("--mock-data") + " --data-path some/prefix"
    unread = (
        "--split 9,1,0: the validation and test parts are not read with --eval-iters 0; --split 1 trains on all data"
    )
    assert notes_about("--split", "--split 9,1,0 --eval-iters 0", base) == [unread]
    assert (
        notes_about("--split", "--split 1 --eval-iters 0", base) == notes_about("--split", "--split 9,1,0", base) == []
    )


def test_data_of_a_split_that_nothing_reads() -> None:
    base = without("--mock-data") + " --train-data-path a --valid-data-path b --test-data-path c"
    for field, path in (("valid", "b"), ("test", "c")):
        (note,) = notes_about(f"--{field}-data-path", "--eval-iters 0", base)
        assert note == f"--{field}-data-path {path}: has no effect with --eval-iters 0"
        assert notes_about(f"--{field}-data-path", "", base) == []
    assert notes_about("--train-data-path", "--skip-train", base)


def test_a_balance_loss_without_a_coefficient_says_that_it_balances_nothing() -> None:
    flag = "--moe-router-load-balancing-type"
    (note,) = notes_about(flag, "--num-experts 4")
    assert note == (
        f"{flag} aux_loss: aux_loss does not balance the experts with --moe-aux-loss-coeff 0.0; a coefficient above 0 "
        "does, such as 0.01"
    )
    (note,) = notes_about(flag, f"--num-experts 4 {flag} aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0")
    assert ": seq_aux_loss does not balance" in note
    for balanced in ("--moe-aux-loss-coeff 0.01", f"{flag} none", f"{flag} sinkhorn --moe-router-topk 1"):
        assert notes_about(flag, f"--num-experts 4 {balanced}") == []
    bias = "--num-experts 4 --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
    assert notes_about(flag, bias) == [] and notes_about(flag, f"{bias} {flag} aux_loss")


def test_logits_are_measured_where_a_layer_has_softmax_attention() -> None:
    def said(flags: str) -> list[str]:
        notes = configured(f"--num-layers 2 --qk-clip --log-max-attention-logit --mamba-num-groups 2 {flags}").notes
        return [note.partition(":")[0] for note in notes if "dense softmax attention, which no layer has" in note]

    both, gated = ["--qk-clip", "--log-max-attention-logit"], "--experimental-attention-variant gated_delta_net"
    assert said("") == said("--hybrid-layer-pattern M*") == said(f"{gated} --linear-attention-freq [1,0]") == []
    assert said("--hybrid-layer-pattern M/* --mtp-num-layers 1 --num-layers 1") == []
    assert said("--hybrid-layer-pattern M-") == said(f"{gated} --linear-attention-freq [1,1]") == both


def test_flags_of_layouts_that_nothing_reads() -> None:
    (note,) = notes_about(
        "--hierarchical-context-parallel-sizes",
        "--context-parallel-size 2 --hierarchical-context-parallel-sizes 2 1",
        ranks=2,
    )
    assert note.endswith("has no effect with --cp-comm-type p2p; a2a+p2p has levels")
    group = "--microbatch-group-size-per-virtual-pipeline-stage"
    (note,) = notes_about(group, f"--pipeline-model-parallel-size 2 {group} 2", ranks=2)
    assert note.endswith("has no effect without --num-virtual-stages-per-pipeline-rank")
    chunks = f"--pipeline-model-parallel-size 2 {group} 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"
    assert notes_about(group, chunks, ranks=2) == []


def test_flags_of_blends_and_object_stores_say_that_there_is_none() -> None:
    base = without("--mock-data") + " --split 9,1,0"
    blend = "--mid-level-dataset-surplus 0.1"
    (note,) = notes_about("--mid-level-dataset-surplus", f"{blend} --data-path a", base)
    assert note == f"{blend}: has no effect: --data-path a is one data set, not a blend"
    assert notes_about("--mid-level-dataset-surplus", f"{blend} --data-path 1 a 2 b", base) == []
    cache = "--object-storage-cache-path x"
    (note,) = notes_about("--object-storage-cache-path", f"{cache} --data-path a", base)
    assert note == f"{cache}: has no effect: --data-path a is on this machine, not in an object store"


def test_a_gpt_sees_no_later_keys_and_says_so_of_its_window() -> None:
    line = configure(
        f"{SMALL} --window-size 5,3".split(), args_defaults={"model_family": "gpt"}, launch_environment=ONE_PROCESS
    )
    (note,) = (note for note in line.notes if note.startswith("--window-size"))
    assert note == "--window-size 5 3: the second number has no effect: a GPT sees no later tokens; 5,0 means the same"


def test_without_experts_their_sizes_change_no_grid() -> None:
    config = configured("--expert-tensor-parallel-size 2")
    assert config.grid == configured().grid
    assert "--expert-tensor-parallel-size 2: has no effect without --num-experts" in config.notes


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--use-mcore-models", "--use-mcore-models: there are no other models"),
        ("--no-gradient-accumulation-fusion", "--no-gradient-accumulation-fusion: weight gradients are always"),
        (
            "--overlap-grad-reduce --overlap-param-gather --tp-comm-overlap",
            "--overlap-param-gather: has no effect without --use-distributed-optimizer",
        ),
        ("--tp-comm-overlap", "--tp-comm-overlap: has no effect without --sequence-parallel"),
        ("--tp-comm-overlap-rs-dgrad", "--tp-comm-overlap-rs-dgrad: has no effect without --tp-comm-overlap"),
        ("--disable-tp-comm-overlap-ag", "--disable-tp-comm-overlap-ag: has no effect without --tp-comm-overlap"),
        ("--disable-tp-comm-overlap-rs", "--disable-tp-comm-overlap-rs: has no effect without --tp-comm-overlap"),
        (
            "--tp-comm-overlap-transport process-group",
            "--tp-comm-overlap-transport process-group: has no effect without --tp-comm-overlap",
        ),
        ("--disable-tp-comm-bulk-wgrad", "--disable-tp-comm-bulk-wgrad: inputs are always gathered while input"),
        ("--disable-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-dgrad: input gradients are always summed while"),
        ("--tp-comm-overlap-cfg x", "--tp-comm-overlap-cfg x: it describes buffers of Transformer Engine"),
        ("--decoder-first-pipeline-num-layers 1", "--decoder-first-pipeline-num-layers 1: has no effect while --pipe"),
        ("--cp-comm-type a2a", "--cp-comm-type a2a: has no effect while --context-parallel-size is 1"),
        ("--data-parallel-sharding-strategy optim", "--data-parallel-sharding-strategy optim: has no effect without"),
        (
            "--num-distributed-optimizer-instances 2",
            "--num-distributed-optimizer-instances 2: has no effect without --use-distributed-optimizer",
        ),
        ("--use-torch-fsdp2", "--use-torch-fsdp2: read as --use-megatron-fsdp --data-parallel-sharding-strategy"),
        ("--save x --async-save --use-persistent-ckpt-worker", "--use-persistent-ckpt-worker: a thread of each rank"),
        ("--async-save", "--async-save: has no effect without --save"),
        ("--sequence-parallel", "--sequence-parallel: has no effect while --tensor-model-parallel-size is 1"),
        ("--moe-router-topk 4", "--moe-router-topk 4: has no effect without --num-experts"),
        ("--moe-router-topk 2", "--moe-router-topk 2: has no effect without --num-experts"),
        (
            "--cuda-graph-warmup-steps 5",
            "--cuda-graph-warmup-steps 5: has no effect without --cuda-graph-impl local or --enable-cuda-graph",
        ),
        (
            "--experimental-attention-variant dsa --multi-latent-attention --dsa-indexer-n-heads 2 "
            "--dsa-indexer-head-dim 64 --dsa-indexer-topk 4 --dsa-indexer-use-sparse-loss",
            "--dsa-indexer-use-sparse-loss: has no effect without --dsa-indexer-loss-coeff",
        ),
        ("--save-interval 3", "--save-interval 3: has no effect without --save"),
        ("--fp8-amax-history-len 8", "--fp8-amax-history-len 8: has no effect without --fp8-format"),
        ("--rotary-base 5", "--rotary-base 5: has no effect without --position-embedding-type rope"),
        (
            "--no-check-for-nan-in-loss-and-grad --nonfinite-action skip",
            "--nonfinite-action skip: has no effect with --no-check-for-nan-in-loss-and-grad",
        ),
        ("--manual-gc-interval 5", "--manual-gc-interval 5: has no effect without --manual-gc"),
        ("--eval-interval 5 --eval-iters 0", "--eval-interval 5: has no effect with --eval-iters 0"),
        (
            "--vocab-file /no/such",
            "--vocab-file /no/such: has no effect with --tokenizer-type NullTokenizer, which does",
        ),
        ("--use-nccl-ub", "--use-nccl-ub: buffers are not registered with NCCL"),
        ("--no-load-optim", "--no-load-optim: has no effect without --load"),
        ("--ckpt-waive-keys x*", "--ckpt-waive-keys x*: has no effect without --load or --pretrained-checkpoint"),
        ("--non-persistent-save-interval 5", "--non-persistent-save-interval 5: has no effect without --save"),
        ("--num-query-groups 4", "--num-query-groups 4: has no effect without --group-query-attention"),
        (
            "--num-query-groups 4 --multi-latent-attention",
            "--num-query-groups 4: has no effect with --multi-latent-attention",
        ),
        ("--fim-split-sample x --fim-fragment-rate 0.1", "--fim-fragment-rate 0.1: has no effect without --fim-data"),
        ("--swiglu --no-bias-gelu-fusion", "--no-bias-gelu-fusion: has no effect with --swiglu"),
        ("--disable-bias-linear --no-bias-gelu-fusion", "--no-bias-gelu-fusion: has no effect with --disable-bias-l"),
        ("--window-size -1,-1", "--window-size -1 -1: has no effect: -1 means all keys"),
        (
            "--recompute-activations --recompute-granularity full --recompute-method block --recompute-num-layers 1",
            "--recompute-activations: has no effect with --recompute-granularity full",
        ),
        ("--use-megatron-fsdp", "--use-megatron-fsdp: shards nothing with --data-parallel-sharding-strategy no_shard"),
        ("--hang-timeout-seconds 9", "--hang-timeout-seconds 9: has no effect in one process"),
        ("--distributed-timeout-minutes 9", "--distributed-timeout-minutes 9: has no effect in one process"),
        (
            "--check-weight-hash-across-dp-replicas-interval 9",
            "--check-weight-hash-across-dp-replicas-interval 9: has no effect: there is one replica",
        ),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1 --weight-decay 0.5",
            "--weight-decay 0.5: has no effect with --start-weight-decay 0.0 and --end-weight-decay 1.0",
        ),
        (
            "--hybrid-layer-pattern *- --mamba-state-dim 64 --mamba-head-dim 16",
            "--mamba-state-dim 64, --mamba-head-dim 16: no effect, since --hybrid-layer-pattern *- has no layer M",
        ),
        (
            "--hybrid-layer-pattern M- --mamba-num-groups 2 --kv-channels 8 --attention-dropout 0",
            "--kv-channels 8, --attention-dropout 0.0: no effect, since --hybrid-layer-pattern M- has no layer",
        ),
    ],
)
def test_a_flag_without_effect_is_accepted_with_a_reason(flags: str, note: str) -> None:
    assert any(line.startswith(note) for line in configured(flags).notes), configured(flags).notes


def test_a_flag_that_needs_one_that_is_on_by_default_has_an_effect() -> None:
    assert not any("--nonfinite-action" in line for line in configured("--nonfinite-action skip").notes)


def test_flags_at_their_defaults_without_the_flag_that_they_need_share_one_line() -> None:
    def said(flags: str) -> list[str]:
        return [note for note in configured(flags).notes if note.startswith("given at ")]

    rotary, rope = "--rotary-base 10000", "--position-embedding-type rope or --multi-latent-attention"
    assert said(rotary) == [f"given at its default, without effect: {rotary} (without {rope})"]
    (together,) = said(f"{rotary} --fp8-margin 0 --save-interval 3 --moe-router-topk 2")
    assert together.startswith("given at their defaults, without effect: ")
    assert f"{rotary} (without {rope})" in together
    assert "--fp8-margin 0 (without --fp8-format)" in together
    assert "--save-interval" not in together and "--moe-router-topk" not in together  # these have lines of their own
    assert said("") == said(f"{rotary} --position-embedding-type rope") == []


def test_the_cyclic_order_ignores_data_sharding_and_says_so() -> None:
    notes = configured("--dataloader-type cyclic --no-data-sharding").notes
    assert any(note.startswith("--no-data-sharding: the cyclic order is one permutation") for note in notes)


def test_a_default_that_is_given_needs_no_line() -> None:
    quiet = configured().notes
    given = configured(
        "--tensor-model-parallel-size 1 --cross-entropy-fusion-impl native --manual-gc --manual-gc-interval 0"
    )
    assert given.notes == quiet


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--rotary-percent 1.5", "--rotary-percent 1.5 must be larger than 0 and at most 1"),
        ("--window-size (-5,2)", "--window-size -5 2: give the numbers of earlier and of later keys"),
        ("--rope-scaling-factor -3", "--rope-scaling-factor -3.0 must be larger than 0"),
    ],
)
def test_an_impossible_value_is_refused_even_where_nothing_reads_it(flags: str, problem: str) -> None:
    assert [line for line in problems_of(flags) if line.startswith(problem)]
