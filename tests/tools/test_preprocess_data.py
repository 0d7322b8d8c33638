"""tools/preprocess_data.py as a user runs it: Megatron-LM's commands as quoted, exit codes, what is printed."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import python

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/data/golden/corpus"


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like a checkout with data beside the tools."""
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    for name, source in {
        "codeparrot_data.json": "corpus.jsonl",
        "data.jsonl": "corpus.jsonl",
        "vocab.json": "gpt2bpe/vocab.json",
        "merges.txt": "gpt2bpe/merges.txt",
    }.items():
        (tmp_path / name).write_bytes((GOLDEN / source).read_bytes())
    return tmp_path


def run(folder, command):
    words = command.split()
    assert words[0] == "python"
    return subprocess.run([python(), *words[1:]], cwd=folder, capture_output=True, text=True)


def output(folder, prefix, key="text"):
    return [(folder / f"{prefix}_{key}_document.{suffix}").read_bytes() for suffix in ("bin", "idx")]


def golden(name):
    return [(GOLDEN / f"pp/{name}_document.{suffix}").read_bytes() for suffix in ("bin", "idx")]


def test_the_command_of_the_course(checkout):
    done = run(
        checkout,
        "python tools/preprocess_data.py --input codeparrot_data.json --output-prefix codeparrot --vocab vocab.json "
        "--dataset-impl mmap --tokenizer-type GPT2BPETokenizer --merge-file merges.txt --json-keys text --workers 20 "
        "--chunk-size 25",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "warning: --vocab: read as --vocab-file",
        "warning: --dataset-impl: no effect: there is one format, .bin and .idx",
        "warning: --chunk-size: no effect: workers process blocks of the input",
        "warning: without --append-eod no token marks the end of a document, and the next document follows directly",
    ]
    assert output(checkout, "codeparrot") == golden("gpt2_noeod_text")
    assert "200 documents, 189 sequences, 8,318 tokens (uint16)" in done.stdout
    assert "1 of the documents spell out a special token, taken as ordinary text" in done.stdout


def test_the_command_with_a_hugging_face_folder(checkout):
    done = run(
        checkout,
        "python tools/preprocess_data.py --input data.jsonl --output-prefix out --tokenizer-type HuggingFaceTokenizer "
        f"--tokenizer-model {GOLDEN / 'hf'} --workers 8 --append-eod",
    )
    assert done.returncode == 0 and done.stderr == ""
    assert "1 of the documents spell out a special token, taken as that token" in done.stdout
    ids, _ = output(checkout, "out")
    assert len(ids) == len(golden("gpt2_eod_text")[0]) - 2 * 10  # eleven pieces are one token
    assert ids[-2:] == b"\x00\x00"


def test_a_command_for_bert(checkout):
    done = run(
        checkout,
        "python tools/preprocess_data.py --input data.jsonl --output-prefix bert --tokenizer-type "
        f"BertWordPieceLowerCase --vocab-file {GOLDEN / 'bert/vocab.txt'} --json-keys body --workers 2",
    )
    assert done.returncode == 0, done.stderr
    assert output(checkout, "bert", "body") == golden("bert_body")


@pytest.fixture
def tool(checkout, monkeypatch, capsys):
    """Runs the tool's main in the checkout; returns exit code, lines of stdout, lines of stderr."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.chdir(checkout)
    main = importlib.import_module("preprocess_data").main

    def run_main(flags):
        code = main(flags.split())
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return run_main


BPE = "--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt"
FILES = "--input data.jsonl --output-prefix x"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (f"{FILES} --json-keys txt {BPE}", ["data.jsonl:1: no key 'txt'; keys present: 'text', 'title', 'body', 'id'"]),
        (f"--input none.jsonl --output-prefix x {BPE}", ["--input none.jsonl: no such file"]),
        (f"{FILES} {BPE} --vocab-file no.json", ["--vocab-file no.json: No such file"]),
        (f"{FILES} --vocab-file vocab.json", ["--vocab-file and --merge-file: GPT2BPETokenizer needs both"]),
        (f"{FILES} {BPE} --split-sentences --lang ../x", ["--lang ../x: not the name of a language"]),
        (f"--input data.jsonl --output-prefix vocab.json/x {BPE}", ["--output-prefix vocab.json/x: vocab.json: "]),
        (
            "--tokenizer-type MultimodalTokenizer --workers 0 --inptu x --log-interval many",
            [
                "--inptu: unknown flag; did you mean --input?",
                "--log-interval many:",
                "--input: missing",
                "--output-prefix: missing",
                "--workers 0: must be at least 1",
                "--tokenizer-type MultimodalTokenizer: not yet; what works so far is GPT2BPETokenizer or",
            ],
        ),
    ],
)
def test_mistakes_are_named_and_exit_with_2(tool, checkout, flags, says):
    code, _, lines = tool(flags)
    errors = [line for line in lines if not line.startswith("warning: ")]
    assert code == 2 and len(errors) == len(says)
    for wanted in says:
        assert any(line.startswith(f"error: {wanted}") for line in errors), errors
    assert not list(checkout.glob("x_*"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no end of a sentence", "no document has two sentences, of which BERT makes pairs"),
        ("", "no tokens, so nothing can be trained on it"),
        ("One. Two.", None),
    ],
)
def test_data_without_sentences_or_tokens_is_told(tool, checkout, text, said):
    (checkout / "data.jsonl").write_text(json.dumps({"text": text}) + "\n")
    code, _, lines = tool(f"{FILES} --split-sentences {BPE}")
    found = [line for line in lines if line.startswith("warning: x_text_sentence: ")]
    assert code == 0 and len(found) == (said is not None) and all(said in line for line in found)


def test_dropped_and_blank_lines_are_told(tool, checkout):
    (checkout / "data.jsonl").write_bytes(b'{"text": "a"}\n\nnonsense\n{"text": 3}\n')
    code, lines, _ = tool(f"{FILES} --on-error skip {BPE}")
    assert code == 0 and "blank lines, passed over: 1" in lines
    at = lines.index("dropped lines: 2 (1 not JSON, 1 wrong type); the first:")
    assert lines[at + 1].startswith("  data.jsonl:3: not JSON")
    manifest = json.loads((checkout / "x_text_document.manifest.json").read_text())
    assert manifest["dropped_lines"] == {"not JSON": 1, "wrong type": 1}


def test_partitions_and_slow_tokenizers_are_told(tool, checkout):
    made = json.loads((GOLDEN / "hf/tokenizer.json").read_text())
    made["normalizer"] = {"type": "Lowercase"}
    (checkout / "tokenizer.json").write_text(json.dumps(made))
    flags = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod --partitions 2"
    code, _, (order, slow) = tool(f"{FILES} {flags}")
    assert code == 0
    assert order.startswith("warning: --partitions 2: documents get another order")
    assert slow.startswith("warning: HuggingFaceTokenizer: slow") and "normalizer is Lowercase" in slow


def test_help_groups_flags(tool, capsys):
    with pytest.raises(SystemExit) as stop:
        tool("--help")
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert "\ninput and output:\n" in shown and "\ntokenizer:\n" in shown
    assert "--max-line-bytes N" in shown and "\naccepted without effect:\n" in shown


@pytest.mark.slow
def test_nothing_of_a_gpu_is_imported():
    code = (
        "import sys; sys.path.insert(0, 'tools'); import preprocess_data\n"
        "print([name for name in ('triton', 'apex', 'transformer_engine', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
