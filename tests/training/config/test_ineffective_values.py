"""Notes about flags that have no effect beside certain values of others."""

from support.command_lines import SMALL, configured, without

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
    both = f"--overlap-moe-expert-parallel-comm {shared} --moe-shared-expert-intermediate-size 64"
    assert said(both) == [shared, "--overlap-moe-expert-parallel-comm"]
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
