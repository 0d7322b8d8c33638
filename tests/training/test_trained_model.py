"""A model as a run in any layout saved it, for use in one process."""

import pytest

from megatron.core.exceptions import UserError
from megatron.training.trained_model import _for_one_process, config_for_one_process

LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --use-megatron-fsdp "
    "--pipeline-model-parallel-layout Et|tL --context-parallel-size 2 --cp-comm-type a2a+p2p "
    "--hierarchical-context-parallel-sizes 1 2 --num-distributed-optimizer-instances 2 --recompute-granularity full "
    "--pipeline-schedule zb-v --use-torch-fsdp2"
)
MODEL = "--num-layers 2 --hidden-size 32 --untie-embeddings-and-output-weights --data-path a b"


@pytest.mark.parametrize(
    ("line", "half", "left"),
    [
        (f"--seq-length 8 {LAYOUT} {MODEL} --bf16", True, f"--seq-length 8 {MODEL} --bf16"),
        (f"{MODEL} --bf16 {LAYOUT}", False, MODEL),
        (f"{LAYOUT} --fp64 {MODEL} --of-another-release 1", False, f"--fp64 {MODEL}"),
    ],
)
def test_the_flags_of_a_layout_are_left_out(line, half, left):
    kept = [word for one in _for_one_process(line.split(), half=half) for word in one.as_words()]
    assert kept == left.split()


def described(flags: str) -> dict[str, object]:
    """What a checkpoint records of a run of these flags."""
    sizes = "--micro-batch-size 1 --num-attention-heads 4 --hidden-size 32 --seq-length 8"
    sizes += " --tokenizer-type NullTokenizer --vocab-size 9"
    return {"command_line": f"{sizes} {flags}".split(), "architecture": {}}


@pytest.mark.parametrize(
    "flags",
    [
        "--exp-avg-dtype bf16 --use-precision-aware-optimizer --use-distributed-optimizer --bf16",
        "--num-experts 2 --moe-use-upcycling --load dense",
        "--finetune --ckpt-step 3 --exit-on-missing-checkpoint --load other --save mine --save-hf-interval 3",
        "--encoder-tensor-model-parallel-size 2 --tensor-model-parallel-size 2",
        "--use-checkpoint-args --load elsewhere",
        "--data-cache-path /a --wandb-project p --tensorboard-dir t --metrics-path m --moe-routing-trace-path r",
        "--attention-backend flash --moe-token-dispatcher-type flex --num-experts 2",
        "--help all",
    ],
)
def test_what_the_run_chose_is_no_obstacle(flags):
    config = config_for_one_process(described(f"--num-layers 2 {flags}"), [], has_cuda=False)
    assert config.transformer.num_layers == 2 and config.checkpoint.load is None and config.checkpoint.save is None


def test_stages_of_a_pattern_are_left_out():
    config = config_for_one_process(described("--hybrid-layer-pattern *-|*-"), [], has_cuda=False)
    assert config.transformer.hybrid_layer_pattern == "*-*-"


def test_a_checkpoint_cannot_run_code(tmp_path, monkeypatch):
    """Importing the module, or calling what it names, would be noticed."""
    (tmp_path / "of_the_checkpoint.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for spec in ("of_the_checkpoint spec", "os abort"):
        code = described(f"--num-layers 2 --spec {spec} --config {tmp_path}/none.yaml")
        with pytest.raises(UserError, match=f"--spec {spec}, which is code, .* give this --spec again if you trust"):
            config_for_one_process(code, [], has_cuda=False)
    given = ["--spec", "megatron.core.models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec"]
    assert config_for_one_process(code, given, has_cuda=False).model.spec == given[1:]


def test_an_unknown_family_is_refused():
    with pytest.raises(UserError, match="model family 'gan'; gpt, bert, t5 are known"):
        config_for_one_process(described("--num-layers 2") | {"model_family": "gan"}, [], has_cuda=False)
