"""tools/checkpoint/convert.py as a user runs it."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from conversion.megatron_lm.test_torch_dist import read_by_torch
from conversion.megatron_runs import FLAGS, GOLDEN, same_bits
from conversion.oracles import make_model, save_model
from conversion.saved_models import LLAMA, save_checkpoint
from safetensors.torch import load_file
from support.programs import python
from support.runs import train
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron.interrupts import run_main
from megatron.training.trained_model import load_trained_model
from pretrain_gpt import build_model
from tools.checkpoint.convert import main, size_in_bytes

FIRST = "the first word must be one of import, export, import-megatron, export-megatron, --from, --from-hf"
SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "checkpoint" / "convert.py"


def test_the_script_runs_in_its_own_folder() -> None:
    """Another tool in that folder has the name of Python's own module inspect."""
    done = subprocess.run(
        [python(), SCRIPT.name, "import", "--help"],
        cwd=SCRIPT.parent,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--hf-dir" in done.stdout and "--verify" in done.stdout


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = save_model(make_model("qwen 2", torch.float32), tmp_path / "theirs")
    assert (
        main(["import", "--hf-dir", str(theirs), "--save", str(tmp_path / "ours"), "--verify", "--dtype", "bf16"]) == 0
    )
    assert "verified: transformers computes the same logits for 2 rows of 64 random tokens" in capsys.readouterr().out
    words = ["export", "--load", str(tmp_path / "ours"), "--hf-dir", str(tmp_path / "back"), "--max-shard-size", "50KB"]
    assert main([*words, "--verify"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path / 'back'}: Qwen2ForCausalLM, ")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_from_megatron_to_the_hub_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command each way. transformers computes the logits of the weights; the second way gives the same names and
    weights as the checkpoint that the first began with."""
    source, flags = GOLDEN / "llamastyle_distopt_fully_reshardable", FLAGS["llamastyle_distopt_fully_reshardable"]
    hub, back = tmp_path / "hub", tmp_path / "back"
    assert main(["--from", str(source), "--to-hf", str(hub), "--", *flags.split()]) == 0
    out = capsys.readouterr().out
    assert f"{hub}: LlamaForCausalLM, " in out and "verified: transformers computes the same logits" in out
    assert main(["--from-hf", str(hub), "--to", str(back)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hub"]
    theirs, ours = read_by_torch(source / "iter_0000001"), read_by_torch(back / "release")
    assert ours.keys() == {name for name in theirs if not name.startswith("optimizer.")}
    for name, tensor in ours.items():
        assert same_bits(tensor[: len(theirs[name])], theirs[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "kind"),
    [
        ("nemotron h", {"norm_topk_prob": True, "n_group": 1, "topk_group": 1}, "torch_dist"),
        ("nemotron h without experts", {"mlp_bias": False}, "torch_dcp"),
        ("qwen 3 next, published layers", {"norm_topk_prob": True}, "fsdp_dtensor"),
    ],
)
def test_hybrids_go_through_each_format_and_back(
    name: str, settings: dict[str, object], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mamba-2, attention, MLP, experts and gated delta nets. transformers computes the logits of what Megatron-LM's
    checkpoint holds, and the folder has the names and weights that it began with."""
    hub = save_model(make_model(name, torch.float32, **settings), tmp_path / "hub")
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    assert main(["--from-hf", str(hub), "--to", str(theirs), "--ckpt-format", kind]) == 0
    assert f"weights only, in the format {kind}" in capsys.readouterr().out
    assert main(["--from", str(theirs), "--to-hf", str(back), "--verify"]) == 0
    assert "verified: transformers computes the same logits" in capsys.readouterr().out
    first, second = (load_file(folder / "model.safetensors") for folder in (hub, back))
    assert first.keys() == second.keys()
    assert all(same_bits(first[key], second[key].view(first[key].shape)) for key in first)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--from a --to b", "error: give --from with --to-hf, or --from-hf with --to"),
        ("--dtype bf16 --from a", "error: give --from with --to-hf, or --from-hf with --to"),
        ("--from-hf a --to b --ckpt-step 3 -- --num-layers 2", "--ckpt-step is for --from"),
        ("--from-hf a --to b -- --num-layers 2", "error: flags after -- are for --from"),
        ("--from a --to-hf b --transformer-impl local", "error: --transformer-impl is for --to"),
        ("--from a --to-hf b --ckpt-format torch_dcp", "error: --ckpt-format is for --to"),
        ("--from-hf a --to FULL", "FULL is not empty"),
    ],
)
def test_a_way_has_two_ends_and_flags_of_its_own(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FULL" / "x").mkdir(parents=True)
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_the_tokenizer_of_a_way_back_is_that_of_the_hub(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    hub = save_model(make_model("qwen 2", torch.float32), tmp_path / "hub")
    tokenizer.save(str(hub / "tokenizer.json"))
    (hub / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    assert main(["--from-hf", str(hub), "--to", str(tmp_path / "back")]) == 0
    assert main(["--from", str(tmp_path / "back"), "--to-hf", str(tmp_path / "again"), "--no-verify"]) == 0
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (hub / "tokenizer.json").read_bytes()


def test_a_termination_leaves_no_files_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def import_some(hub: Path, root: Path, *others: object, **options: object) -> None:
        root.mkdir()
        os.kill(os.getpid(), signal.SIGTERM)

    # Without the handler of run_main, this one lets the test fail instead of ending it.
    former = signal.signal(signal.SIGTERM, lambda number, frame: None)
    monkeypatch.setattr("tools.checkpoint.convert.import_model", import_some)
    try:
        with pytest.raises(SystemExit, match="143"):
            run_main(lambda: main(["--from-hf", "hub", "--to", str(tmp_path / "back")]))
    finally:
        signal.signal(signal.SIGTERM, former)
    assert not list(tmp_path.iterdir())


def test_a_run_with_the_printed_flags_starts_from_the_imported_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = save_model(make_model("qwen 3", torch.float32), tmp_path / "theirs")
    assert main(["import", "--hf-dir", str(theirs), "--save", str(tmp_path / "ours")]) == 0
    flags = f"--config {tmp_path / 'ours' / 'flags.yaml'}"
    assert flags in capsys.readouterr().out
    rest = "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --num-workers 0 --mock-data --eval-iters 0"
    end = f"--lr 0 --train-iters 1 --save {tmp_path / 'run'} --no-save-optim"
    train(f"{rest} {end} --pretrained-checkpoint {tmp_path / 'ours'}", base=flags)
    before, after = (load_trained_model(build_model, tmp_path / folder).model for folder in ("ours", "run"))
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        assert torch.equal(old, new), name


def test_a_refused_export_is_an_error_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sinkhorn = "--num-experts 4 --moe-router-load-balancing-type sinkhorn"
    root = save_checkpoint(f"{LLAMA} {sinkhorn}", tmp_path / "run")
    words = ["export", "--load", str(root), "--hf-dir", str(tmp_path / "theirs")]
    assert main([*words, "--architecture", "MixtralForCausalLM"]) == 2
    said = (
        "error: no architecture that can be exported has Sinkhorn routing (--moe-router-load-balancing-type sinkhorn)"
    )
    assert capsys.readouterr().err.startswith(said)


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ([], f"error: {FIRST}\n"),
        (
            ["convert"],
            f"error: {FIRST}, not convert\n",
        ),
        (["import", "--save", "x"], "error: --hf-dir is required\n"),
        (["export", "--load", "x", "--hf-dir", "y", "--max-shard-size", "5XB"], "5XB: not a size, such as 5GB"),
        (["import", "--hf-dir", str(tmp_path), "--save", "x"], f"error: {tmp_path} has no config.json"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_sizes() -> None:
    assert size_in_bytes("5GB") == 5 * 10**9 and size_in_bytes("1MiB") == 1 << 20 and size_in_bytes("7") == 7
