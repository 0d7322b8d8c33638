"""tools/generate.py: a checkpoint and its own record are enough; flags, batches, and what is wrong with them."""

import contextlib
import dataclasses
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.programs import python
from support.reference_gpt import reference_logits
from support.saved_models import save_random_model

from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.data.tokenizer.config import TokenizerConfig
from megatron.data.tokenizer.null import NullTokenizer
from megatron.data.tokenizer.sft import SFTTokenizer
from megatron.training.trained_model import load_trained_model

ROOT = Path(__file__).parents[2]
BPE = ROOT / "tests" / "data" / "golden" / "corpus" / "gpt2bpe"
MODEL = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "40", "--max-position-embeddings", "40", "--micro-batch-size", "2"),
    *("--train-iters", "3", "--lr", "1e-3", "--mock-data", "--qk-layernorm", "--disable-bias-linear", "--bf16"),
]


def tool(path: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"{Path(path).stem}_tool", ROOT / "tools" / path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


GENERATE = tool("generate.py")
CONVERT = tool("checkpoint/convert.py")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run with these flags saves, with weights that are worth generating from."""
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    tokenizer = ["--vocab-file", str(BPE / "vocab.json"), "--merge-file", str(BPE / "merges.txt")]
    save_random_model(root, [*MODEL, *tokenizer])
    return root


def run(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, str, str]:
    code = GENERATE.main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_greedy_text_is_what_the_plain_model_says(checkpoints: Path, capsys: pytest.CaptureFixture) -> None:
    code, out, err = run(capsys, "--load", checkpoints, "--prompt", "The ", "--max-new-tokens", 8)
    assert code == 0 and "iteration 3" in err
    trained = load_trained_model(GENERATE.build_model, checkpoints)
    weights = {name: value.float() for name, value in trained.model.state_dict().items()}
    tokenizer, ids = trained.tokenizer, trained.tokenizer.tokenize("The ")
    for _ in range(8):
        logits = reference_logits(weights, trained.config.transformer, {"vocab_size": 600}, torch.tensor([ids]))
        ids.append(int(logits[0, -1].argmax()))
    assert tokenizer.eod not in ids
    assert out == tokenizer.detokenize(ids) + "\n"


def test_a_foreign_checkpoint_runs_no_code(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--spec is only imported if it is given again."""
    (tmp_path / "own_layers.py").write_text(
        "from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec\n"
        "def layers(**options): return get_gpt_layer_local_spec(qk_layernorm=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(checkpoints, tmp_path / "run")
    path = tmp_path / "run/iter_0000003/manifest.json"
    manifest = Manifest.from_bytes(path.read_bytes(), path)
    words = ("--load", tmp_path / "run", "--prompt", "The ", "--max-new-tokens", 4)
    for spec in ("os abort", "own_layers layers"):
        config = {**manifest.config, "command_line": [*manifest.config["command_line"], "--spec", *spec.split()]}
        path.write_bytes(dataclasses.replace(manifest, config=config).to_bytes())
        code, _, err = run(capsys, *words)
        assert code == 2 and f"--spec {spec}, which is code" in err and "own_layers" not in sys.modules
    assert CONVERT.main(["export", "--load", str(tmp_path / "run"), "--hf-dir", str(tmp_path / "hf")]) == 2
    assert "give this --spec again" in capsys.readouterr().err
    code, out, _ = run(capsys, *words, "--spec", "own_layers", "layers")
    assert code == 0 and "own_layers" in sys.modules
    assert run(capsys, "--load", checkpoints, *words[2:])[1] == out


class BlanksBefore(NullTokenizer):
    """Puts a blank before each word, and none at the start of a text, as SentencePiece does."""

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(f" w{i}" for i in ids).removeprefix(" ")


class Cut(NullTokenizer):
    """A letter of two bytes: ids 1 and 2 together; alone neither is one."""

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes({1: 0xC3, 2: 0xBC}.get(i, 0x61) for i in ids).decode(errors="replace")


def test_what_follows_a_prompt_keeps_the_blank_between() -> None:
    assert GENERATE.continuation(NullTokenizer(100), [1, 2], [3, 4]) == " 3 4"
    assert GENERATE.continuation(BlanksBefore(100), [1, 2], [3, 4]) == " w3 w4"
    for tokenizer, first in ((NullTokenizer(100), "3"), (BlanksBefore(100), "w3")):
        assert GENERATE.continuation(tokenizer, [1], []) == "" and GENERATE.continuation(tokenizer, [], [3]) == first
    assert GENERATE.continuation(Cut(100), [0, 1], [2, 0]) == "\ufffda", "the prompt's text cannot be taken back"


def test_rows_longer_than_those_of_training_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Learned positions end there, which is refused; rotary ones go on."""
    model = SimpleNamespace(position_embedding_type="rope", model_family=None)
    trained = SimpleNamespace(
        model=None,
        tokenizer=NullTokenizer(100),
        config=SimpleNamespace(model=model, tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer")),
        iteration=1,
        device="cpu",
        max_sequence_length=16,
    )
    monkeypatch.setattr(GENERATE, "open_trained_model", lambda *_, **__: contextlib.nullcontext(trained))
    monkeypatch.setattr(GENERATE, "generate", lambda *_, **__: [[7], [7]])
    words = ["--load", "x", "--prompt", "1 2", "--prompt", "3", "--max-new-tokens"]
    told = "sequences may reach 17 tokens, but the model was trained for 16"
    assert told not in run(capsys, *words, 14)[2]
    code, out, err = run(capsys, "--load", "x", "--prompt", "def f")
    assert (code, out) == (2, "") and "prompt 'def f': NullTokenizer reads ids" in err
    code, out, err = run(capsys, *words, 15)
    assert (code, out) == (0, "1 2 7\n3 7\n") and told in err


def test_prompts_in_batches_and_alone(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "prompts.txt").write_text("What is it\na\nOnce upon a time\n", encoding="utf-8")
    words = ["--load", checkpoints, "--prompt", "The ", "--prompts-file", tmp_path / "prompts.txt"]
    words += ["--max-new-tokens", 8, "--temperature", 0.9, "--top-p", 0.9, "--top-k", 50]
    together = run(capsys, *words)
    alone = run(capsys, *words, "--batch-size", 1)
    assert together[0] == 0 and together[1] == alone[1]
    assert run(capsys, *words, "--seed", 5)[1] != together[1]
    assert all(text in together[1] for text in ("The ", "What is it", "Once upon a time"))


def test_only_ends_of_lines_divide_prompts(tmp_path: Path) -> None:
    """Not U+2028 or a form feed, at which str.splitlines cuts."""
    (tmp_path / "prompts.txt").write_bytes("one\u2028and\x0cmore\r\n\ntwo".encode())
    config = GENERATE.GenerationConfig(prompts_file=str(tmp_path / "prompts.txt"))
    assert GENERATE.read_prompts(config) == ["one\u2028and\x0cmore", "", "two"]


def test_an_empty_prompt_begins_a_document(checkpoints: Path, capsys: pytest.CaptureFixture) -> None:
    code, out, _ = run(capsys, "--load", checkpoints, "--prompt", "", "--max-new-tokens", 3)
    assert code == 0 and out.strip("\n")


def test_the_tokenizer_may_have_moved(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((BPE / name).read_bytes())
    words = ["--load", checkpoints, "--prompt", "The ", "--max-new-tokens", 3]
    moved = ["--vocab-file", tmp_path / "vocab.json", "--merge-file", tmp_path / "merges.txt"]
    assert run(capsys, *words, *moved)[1] == run(capsys, *words)[1]
    code, _, err = run(capsys, *words, "--vocab-file", tmp_path / "none.json")
    assert code == 2 and "none.json" in err


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "--load is required"),
        (["--load", "nowhere"], "--prompt or --prompts-file is required"),
        (["--load", "nowhere", "--prompt", "a"], "error: --load nowhere: no such folder"),
        (["--load", "CHECKPOINTS", "--prompt", "a", "--ckpt-step", 7], "no checkpoint of iteration 7"),
        (["--load", "CHECKPOINTS", "--prompts-file", "none.txt"], "--prompts-file none.txt"),
        (["--load", "CHECKPOINTS", "--prompt", "a", "--top-k", "-1"], "error: --top-k -1 must be at least 0"),
        (["--load", "CHECKPOINTS", "--prompt", "a", "--top-p", "2"], "error: --top-p 2.0 must be between 0 and 1"),
        (
            ["--load", "CHECKPOINTS", "--prompt", "a", "--temperature", "0"],
            "--temperature 0.0 must be larger than 0",
        ),
        (["--load", "CHECKPOINTS", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens 0 must be at least 1"),
        (["--load", "CHECKPOINTS", "--prompt", "a", "--max-new-tokens", "40"], "--max-new-tokens 39 works"),
        (["--load", "CHECKPOINTS", "--prompt", "a", "--top-n", "3"], "--top-n"),
        (["--load", "CHECKPOINTS", "--prompt", "a", "--min-p", "2"], "error: --min-p 2.0 must be between 0 and 1"),
        (["--load", "x", "--prompt", "a", "--repetition-penalty", "0"], "--repetition-penalty 0.0 must be larger"),
        (["--load", "x", "--prompt", "a", "--bad-words", ""], "--bad-words: a text is empty"),
        (["--load", "x", "--prompt", "a", "--tensor-model-parallel-size", "2"], "--nproc_per_node 2"),
    ],
)
def test_mistakes_are_named(
    words: list, message: str, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *(checkpoints if word == "CHECKPOINTS" else word for word in words))
    assert (code == 2 and out == "" and message in err and err.startswith("error: ")) or message in err


def test_as_a_program(checkpoints: Path) -> None:
    words = ["--load", str(checkpoints), "--prompt", "The ", "--max-new-tokens", "3", "--no-echo"]
    done = subprocess.run([python(), str(ROOT / "tools/generate.py"), *words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() and not done.stdout.startswith("The ")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_chat_continues_the_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Each prompt is what the template makes of all turns so far, the model's answers among them."""
    folder = ROOT / "tests/data/golden/corpus/hf"
    (tmp_path / "chat.jinja").write_text(CHATML)
    flags = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    model = SimpleNamespace(model_family="gpt", position_embedding_type="rope")
    config = SimpleNamespace(tokenizer=flags, model=model)
    tokenizer = SFTTokenizer(str(folder), chat_template=str(tmp_path / "chat.jinja"))
    trained = SimpleNamespace(config=config, model=None, iteration=3, device="cpu", max_sequence_length=99)
    asked = []

    def answer(model, prompts, max_new_tokens, sampling, *, ends, first_sequence):
        assert tokenizer.turn_end() in ends
        asked.append(tokenizer.detokenize(prompts[0]))
        return [tokenizer.tokenize(f"answer {first_sequence}")]

    monkeypatch.setattr(GENERATE, "generate", answer)
    monkeypatch.setattr(GENERATE, "open_trained_model", lambda *_, **__: contextlib.nullcontext(trained))
    words = ["--load", "x", "--chat", "--chat-template", str(tmp_path / "chat.jinja"), "--system", "Be kind."]
    assert run(capsys, *words, "--prompt", "Hi", "--prompt", "And?")[:2] == (0, "answer 0\nanswer 1\n")
    begin = "<|im_start|>system\nBe kind.<|endoftext|><|im_start|>user\nHi<|endoftext|><|im_start|>assistant\n"
    more = "answer 0<|endoftext|><|im_start|>user\nAnd?<|endoftext|><|im_start|>assistant\n"
    assert asked == [begin, begin + more]
    monkeypatch.setattr(sys, "stdin", ["Hi\n"])
    assert run(capsys, *words)[:2] == (0, "answer 0\n") and asked[-1] == begin
    assert "has no chat template; give --chat-template FILE" in run(capsys, *words[:3])[2]
    config.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9)
    assert "--chat: a NullTokenizer has no chat template" in run(capsys, *words)[2]
    assert "--system needs --chat" in run(capsys, "--load", "x", "--prompt", "a", "--system", "b")[2]


def test_penalties_do_not_make_samples(checkpoints: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--load", checkpoints, "--prompt", "The ", "--no-echo", "--max-new-tokens", 8]
    plain = run(capsys, *words)[1]
    assert run(capsys, *words, "--seed", 3)[1] == plain
    assert " with" in plain
    banned = run(capsys, *words, "--bad-words", "with")[1]
    assert "with" not in banned and banned[:5] == plain[:5]
    assert run(capsys, *words, "--bad-words", "with", "--seed", 3)[1] == banned
    assert run(capsys, *words, "--min-p", 0.01)[1] != run(capsys, *words, "--min-p", 0.01, "--seed", 3)[1]


@pytest.mark.slow
def test_ranks_write_what_one_process_writes(checkpoints: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--load", str(checkpoints), "--prompt", "The ", "--prompt", "a", "--max-new-tokens", "6"]
    alone = run(capsys, *words)[1]
    for flags in (["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]):
        command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        done = subprocess.run(
            [*command, str(ROOT / "tools/generate.py"), *words, *flags], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == alone
