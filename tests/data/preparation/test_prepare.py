"""megatron/data/preparation/prepare.py: bytes of Megatron-LM's tool, however many workers; nothing half."""

import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from rich.console import Console
from support.programs import python

from megatron.core.exceptions import UserError
from megatron.data.datasets.index_format import read_header
from megatron.data.preparation.config import PreparationConfig
from megatron.data.preparation.manifest import read_manifest
from megatron.data.preparation.prepare import prepare
from megatron.data.preparation.sentences import RuleSplitter
from megatron.data.tokenizer.bert_wordpiece import BertWordPieceTokenizer
from megatron.data.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.data.tokenizer.null import NullTokenizer

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/data/golden/corpus"
BPE = GPT2BPETokenizer(str(GOLDEN / "gpt2bpe/vocab.json"), str(GOLDEN / "gpt2bpe/merges.txt"))
CORPUS = str(GOLDEN / "corpus.jsonl")


def run(tmp_path, inputs=(CORPUS,), tokenizer=BPE, warnings=None, **flags):
    config = PreparationConfig(input=[str(path) for path in inputs], output_prefix=str(tmp_path / "out"), **flags)
    return prepare(config, tokenizer, Console(file=io.StringIO()), [].append if warnings is None else warnings.append)


def output(tmp_path, key="text", level="document"):
    return tuple((tmp_path / f"out_{key}_{level}.{suffix}").read_bytes() for suffix in ("bin", "idx"))


def golden(name):
    return tuple((GOLDEN / f"pp/{name}_document.{suffix}").read_bytes() for suffix in ("bin", "idx"))


def documents(tmp_path, key="text", level="document"):
    """Ids of each document's sequences."""
    prefix = tmp_path / f"out_{key}_{level}"
    header = read_header(f"{prefix}.idx")
    index = Path(f"{prefix}.idx").read_bytes()
    lengths = np.frombuffer(index, "<i4", header.num_sequences, header.lengths_offset)
    ends = np.frombuffer(index, "<i8", header.num_document_indices, header.document_indices_offset)
    ids = np.fromfile(f"{prefix}.bin", header.dtype)
    sequences = [part.tolist() for part in np.split(ids, np.cumsum(lengths))[:-1]]
    return [sequences[start:end] for start, end in itertools.pairwise(ends)]


def nothing_under(tmp_path):
    return not [path for path in tmp_path.rglob("*") if "out" in path.name]


@pytest.mark.fast("2", "7")
@pytest.mark.parametrize("workers", [1, 2, 3, 7, 20])
def test_bytes_of_megatron_lms_tool(tmp_path, workers):
    run(tmp_path, workers=workers, append_eod=True)
    assert output(tmp_path) == golden("gpt2_eod_text")
    run(tmp_path, workers=workers)
    assert output(tmp_path) == golden("gpt2_noeod_text")


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_sentences_in_word_pieces_are_those_of_megatron_lms_tool(tmp_path, workers):
    bert = BertWordPieceTokenizer(str(GOLDEN / "bert/vocab.txt"), lower_case=True)
    run(tmp_path, tokenizer=bert, workers=workers, json_keys=["body"])
    assert output(tmp_path, "body") == golden("bert_body")


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_texts_are_divided_and_lists_are_sentences(tmp_path, workers, monkeypatch):
    monkeypatch.setattr("nltk.data.path", [])
    warnings: list[str] = []
    bert = BertWordPieceTokenizer(str(GOLDEN / "bert/vocab.txt"), lower_case=True)
    prepared = run(
        tmp_path, tokenizer=bert, workers=workers, json_keys=["text", "body"], split_sentences=True, warnings=warnings
    )
    assert output(tmp_path, "body", "sentence") == golden("bert_body")
    texts = [json.loads(line)["text"] for line in Path(CORPUS).read_text("utf-8").splitlines()]
    found = documents(tmp_path, level="sentence")
    expected = [[bert.tokenize(sentence) for sentence in RuleSplitter().split(text)] for text in texts]
    assert found == [[ids for ids in sentences if ids] for sentences in expected]
    assert max(map(len, found)) > 2
    manifest = prepared.manifests[0]
    assert (manifest.level, manifest.sentences, manifest.key) == ("sentence", "rules", "text")
    assert read_manifest(str(tmp_path / "out_text_sentence")) == manifest
    assert len(warnings) == 1 and "sentences are found by rules" in warnings[0]


@pytest.mark.fast("7-compress0")
@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, zstandard.compress])
@pytest.mark.parametrize("workers", [1, 3, 7])
def test_compressed_input_gives_the_same(tmp_path, workers, pack):
    text = Path(CORPUS).read_bytes()
    members = [pack(text[:30_001]), pack(text[30_001:])]  # as `cat a.gz b.gz` makes them
    (tmp_path / "corpus.jsonl.packed").write_bytes(b"".join(members))
    run(tmp_path, [tmp_path / "corpus.jsonl.packed"], workers=workers, append_eod=True)
    assert output(tmp_path) == golden("gpt2_eod_text")


@pytest.mark.parametrize("workers", [1, 3])
def test_parquet_input_gives_the_same(tmp_path, workers):
    records = [json.loads(line) for line in Path(CORPUS).read_text("utf-8").splitlines()]
    table = pyarrow.table({"text": [record["text"] for record in records], "id": list(range(len(records)))})
    pyarrow.parquet.write_table(table, tmp_path / "corpus.parquet", row_group_size=30, compression="zstd")
    run(tmp_path, [tmp_path / "corpus.parquet"], workers=workers, append_eod=True)
    assert output(tmp_path) == golden("gpt2_eod_text")
    with pytest.raises(UserError, match=r"corpus.parquet: no column 'body'; columns present: 'text', 'id'"):
        run(tmp_path, [tmp_path / "corpus.parquet"], workers=workers, json_keys=["body"])


def test_a_folder_of_mixed_files(tmp_path):
    lines = Path(CORPUS).read_bytes().splitlines(keepends=True)
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/a.jsonl").write_bytes(b"".join(lines[:50]))
    (tmp_path / "in/b.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines[50:120])))
    (tmp_path / "in/sub/c.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[120:])))
    run(tmp_path, [tmp_path / "in"], workers=2, append_eod=True)
    assert output(tmp_path) == golden("gpt2_eod_text")


def test_several_files_follow_each_other(tmp_path):
    lines = Path(CORPUS).read_bytes().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:50]))
    (tmp_path / "b.jsonl").write_bytes(gzip.compress(b"".join(lines[50:120])))
    (tmp_path / "c.jsonl").write_bytes(b"")
    (tmp_path / "d.jsonl").write_bytes(b"".join(lines[120:]))
    for workers in (1, 4):
        run(tmp_path, [tmp_path / "[a-d].jsonl"], workers=workers, append_eod=True)
        assert output(tmp_path) == golden("gpt2_eod_text")


def test_several_keys_and_lists(tmp_path):
    records = [json.loads(line) for line in Path(CORPUS).read_text("utf-8").splitlines()]
    run(tmp_path, workers=3, append_eod=True, json_keys=["text", "title", "body"])
    assert output(tmp_path) == golden("gpt2_eod_text")
    for key in ("title", "body"):
        expected = []
        for record in records:
            texts = [record[key]] if isinstance(record[key], str) else record[key]
            sequences = [ids for ids in map(BPE.tokenize, texts) if ids]
            if sequences:
                sequences[-1].append(BPE.eod)
            expected.append(sequences)
        assert documents(tmp_path, key) == expected


@pytest.mark.fast("1")
@pytest.mark.parametrize("workers", [1, 5])
def test_partitions(tmp_path, workers):
    run(tmp_path, workers=1)
    in_order = documents(tmp_path)
    run(tmp_path, workers=workers, partitions=3, json_keys=["title", "text"])
    assert documents(tmp_path) == in_order[0::3] + in_order[1::3] + in_order[2::3]
    run(tmp_path, workers=workers, partitions=3, keep_sequential_samples=True)
    assert output(tmp_path) == golden("gpt2_noeod_text")


@pytest.mark.parametrize(("size", "dtype"), [(65498, np.uint16), (65499, np.int32)])
def test_type_of_ids(tmp_path, size, dtype):
    (tmp_path / "x.jsonl").write_text('{"text": "1 2 3"}\n')
    run(tmp_path, [tmp_path / "x.jsonl"], NullTokenizer(size), append_eod=True)
    assert read_header(tmp_path / "out_text_document.idx").dtype is dtype
    assert documents(tmp_path) == [[[1, 2, 3, size]]]


def test_manifest(tmp_path):
    prepared = run(tmp_path, workers=2, append_eod=True, json_keys=["text", "title"])
    prefix = str(tmp_path / "out_text_document")
    manifest = read_manifest(prefix)
    assert prepared.manifests[0] == manifest and prepared.prefixes[0] == prefix
    assert (manifest.tokenizer.digest, manifest.tokenizer.vocab_size, manifest.tokenizer.eod) == (BPE.digest, 600, 0)
    assert (manifest.documents, manifest.sequences, manifest.tokens, manifest.lines) == (200, 189, 8507, 200)
    assert (manifest.documents_with_special_literals, manifest.special_literals_matched) == (1, False)
    assert (manifest.append_eod, manifest.dtype, manifest.key, manifest.dropped_lines) == (True, "uint16", "text", {})
    assert manifest.inputs == ({"name": "corpus.jsonl", "bytes": 66516},)
    for suffix, content in zip(("bin", "idx"), output(tmp_path), strict=True):
        assert manifest.files[suffix].sha256 == hashlib.sha256(content).hexdigest()
        assert manifest.files[suffix].bytes == len(content)
    assert read_manifest(str(tmp_path / "out_title_document")).documents_with_special_literals == 0


def corpus_with(tmp_path, bad, count=2000):
    """Lines in many blocks, some of them replaced: {number: content}."""
    lines = [json.dumps({"text": f"line {number} of the file"}).encode() for number in range(1, count + 1)]
    for number, content in bad.items():
        lines[number - 1] = content
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


BAD = {
    1501: (b'{"text": "\xff"}', "not UTF-8: byte 0xff at column 11"),
    1502: (b'{"text": "x"', "not JSON: Expecting"),
    1503: (b'{"txt": "x"}', "no key 'text'; keys present: 'txt'"),
    1504: (b'{"text": 5}', "key 'text' contains the number 5, not a text or a list of texts"),
    1505: (b'{"text": "' + b"y" * 3000 + b'"}', "longer than --max-line-bytes 2000"),
}


@pytest.mark.fast("False-1-1502", "False-4-1505", "True-1-1503", "True-4-1504")
@pytest.mark.parametrize("number", BAD)
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_bad_line_stops_with_its_place(tmp_path, number, workers, compressed):
    path = corpus_with(tmp_path, {number: BAD[number][0], 1900: b"later"})
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(UserError) as error:
        run(tmp_path, [path], workers=workers, max_line_bytes=2000)
    assert str(error.value).startswith(f"{path}:{number}: {BAD[number][1]}")
    assert "--on-error skip" in str(error.value)
    assert nothing_under(tmp_path)


@pytest.mark.slow
def test_the_first_bad_line_is_the_one_named(tmp_path):
    path = corpus_with(tmp_path, {7: b"a", 1000: b"b", 1999: b"c"})
    for _ in range(5):
        with pytest.raises(UserError, match=rf"{path}:7: "):
            run(tmp_path, [path], workers=6)


def test_place_in_a_later_file(tmp_path):
    path = corpus_with(tmp_path, {1234: b"[]"})
    with pytest.raises(UserError, match=rf"{path}:1234: a list, not an object"):
        run(tmp_path, [CORPUS, path], workers=3)


def test_what_the_tokenizer_will_not_take_is_a_bad_line(tmp_path):
    lines = [b'{"text": "%d 5"}' % number for number in range(300)]
    lines[250] = b'{"text": "5 x"}'
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=r"in.jsonl:251: NullTokenizer reads ids .* found 'x'"):
        run(tmp_path, [tmp_path / "in.jsonl"], NullTokenizer(1000), workers=2)
    run(tmp_path, [tmp_path / "in.jsonl"], NullTokenizer(1000), workers=2, on_error="skip")
    assert documents(tmp_path) == [[[number, 5]] for number in range(300) if number != 250]


@pytest.mark.parametrize("workers", [1, 4])
def test_skipping_counts(tmp_path, workers):
    path = corpus_with(tmp_path, {number: content for number, (content, _) in BAD.items()} | {9: b"", 11: b" \r"})
    prepared = run(tmp_path, [path], workers=workers, max_line_bytes=2000, on_error="skip")
    kinds = {"not UTF-8": 1, "not JSON": 1, "missing key": 1, "wrong type": 1, "too long": 1}
    (manifest,) = prepared.manifests
    assert (manifest.dropped_lines, manifest.blank_lines, manifest.lines, manifest.documents) == (kinds, 2, 2000, 1993)
    assert prepared.dropped_examples[0].startswith(f"{path}:1501: not UTF-8") and len(prepared.dropped_examples) == 3
    texts = [BPE.detokenize(ids) for (ids,) in documents(tmp_path)]
    assert texts == [f"line {n} of the file" for n in range(1, 2001) if n not in BAD and n not in (9, 11)]


def test_no_document_is_an_error(tmp_path):
    (tmp_path / "in.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="contains no documents"):
        run(tmp_path, [tmp_path / "in.jsonl"])
    assert nothing_under(tmp_path)


def test_a_failure_leaves_earlier_output_alone(tmp_path):
    run(tmp_path, workers=2, append_eod=True)
    path = corpus_with(tmp_path, {5: b"x"})
    warnings = []
    with pytest.raises(UserError):
        run(tmp_path, [path], warnings=warnings)
    assert output(tmp_path) == golden("gpt2_eod_text") and read_manifest(str(tmp_path / "out_text_document"))
    assert warnings == [f"{tmp_path}/out_text_document.bin: exists and will be replaced"]


@pytest.mark.parametrize("broken", [".bin", ".idx", ".manifest.json"])
def test_a_renaming_that_fails_leaves_no_pair_that_does_not_match(tmp_path, monkeypatch, broken):
    run(tmp_path, append_eod=True)
    old = output(tmp_path)
    replace = os.replace

    def fail(source, target):
        if str(target).endswith(f"_document{broken}"):
            raise OSError(5, "planted", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match="planted"):
        run(tmp_path)
    names = {path.name.removeprefix("out_text_document") for path in tmp_path.iterdir()}
    assert ".manifest.json" not in names
    if ".idx" in names:
        assert output(tmp_path) == golden("gpt2_noeod_text") != old


@pytest.mark.slow
def test_memory_is_that_of_the_longest_line(tmp_path):
    """40 MB of lines of a megabyte, in processes that may grow by half of that. They grow by 4 MB."""
    path = tmp_path / "in.jsonl"
    path.write_bytes((json.dumps({"text": "words of a line that is long " * 36_000}) + "\n").encode() * 40)
    code = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
from rich.console import Console
from megatron.data.preparation.config import PreparationConfig
from megatron.data.preparation.prepare import prepare
from megatron.data.tokenizer.gpt2_bpe import GPT2BPETokenizer
bpe = GPT2BPETokenizer({str(GOLDEN / "gpt2bpe/vocab.json")!r}, {str(GOLDEN / "gpt2bpe/merges.txt")!r})
bpe.encode_texts(["warm up " * 1000])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
config = PreparationConfig(input=[{str(path)!r}], output_prefix={str(tmp_path / "out")!r}, workers=1)
prepare(config, bpe, Console(), print)
after = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print("grown", (after - before) // 1024)
"""
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.split("grown")[1]) < 20
    assert read_header(tmp_path / "out_text_document.idx").num_sequences == 40


def wait_for_working_folder(tmp_path, process):
    while process.poll() is None:
        found = list(tmp_path.glob(".out.preparing.*/worker*.tokens"))
        if found:
            return found[0].parent
        time.sleep(0.05)
    raise AssertionError(f"no worker has begun: {process.stderr.read()}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_in_the_middle(tmp_path, number):
    """No final name exists afterwards; workers end too; and the next run says what was left."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "1 2 3"}\n' * 20_000)
    code = f"""
import os, runpy, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it with SIGINT ignored
sys.path.insert(0, {str(ROOT)!r})
from megatron.data.tokenizer.null import NullTokenizer
main, encode_texts = os.getpid(), NullTokenizer.encode_texts
def encode_late(self, texts):
    while os.getppid() == main:  # a worker is in the middle of its work until the program has ended
        time.sleep(0.02)
    return encode_texts(self, texts)
NullTokenizer.encode_texts = encode_late
runpy.run_path({str(ROOT / "tools/preprocess_data.py")!r}, run_name="__main__")
"""
    words = [
        "--input",
        path,
        "--output-prefix",
        tmp_path / "out",
        "--tokenizer-type",
        "NullTokenizer",
        "--workers",
        "2",
    ]
    command = [python(), "-c", code, *map(str, words), "--vocab-size", "9"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    folder = wait_for_working_folder(tmp_path, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=240)  # until the workers have ended too and closed the file
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number], errors
    assert not list(tmp_path.glob("out*"))
    assert folder.exists() == (number == signal.SIGKILL)
    if number == signal.SIGKILL:
        warnings = []
        run(tmp_path, warnings=warnings)
        assert folder.name in warnings[0]


class Mortal(NullTokenizer):
    """Kills its process when the text '7 7' comes for the first time."""

    def __init__(self, folder):
        super().__init__(99)
        self._mark = folder / "killed"

    def encode_texts(self, texts):
        if "7 7" in texts and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_texts(texts)


@pytest.mark.fast("True-1")
@pytest.mark.parametrize(("packed", "partitions"), [(False, 1), (True, 1), (False, 3)])
def test_a_run_after_a_kill_takes_over_the_finished_blocks(tmp_path, packed, partitions):
    """Another number of workers, and a shard that lost bytes in a power failure: the files are the same."""
    lines = [json.dumps({"text": f"{number % 90} 5"}) for number in range(6000)]
    lines[4500] = '{"text": "7 7"}'
    lines[100] = "no JSON"
    text = "\n".join(lines).encode()
    (tmp_path / "in.jsonl").write_bytes(zstandard.compress(text) if packed else text)
    flags = {"append_eod": True, "on_error": "skip", "partitions": partitions}
    with pytest.raises(UserError, match=r"signal 9; .*; the finished part is kept in .*/\.out\.preparing"):
        run(tmp_path, [tmp_path / "in.jsonl"], Mortal(tmp_path), workers=1, **flags)
    assert not list(tmp_path.glob("out*"))
    (folder,) = tmp_path.glob(".out.preparing.*")
    finished = len((folder / "journal.jsonl").read_bytes().splitlines()) - 2  # sizes and workers
    assert finished > 3
    shard = folder / "worker0.key0.part0.tokens"
    shard.write_bytes(shard.read_bytes()[:-1])  # the last finished block is not whole
    warnings: list[str] = []
    prepared = run(tmp_path, [tmp_path / "in.jsonl"], Mortal(tmp_path), warnings=warnings, workers=3, **flags)
    done = int(re.search(r"finished (\d+) blocks", warnings[0])[1])
    assert 1 < done < finished
    resumed = (output(tmp_path), prepared.manifests[0])
    assert not list(tmp_path.glob(".out.preparing.*"))
    prepared = run(tmp_path, [tmp_path / "in.jsonl"], Mortal(tmp_path), workers=2, **flags)
    assert resumed == (output(tmp_path), prepared.manifests[0])
    assert prepared.manifests[0].dropped_lines == {"not JSON": 1}


def test_changed_input_or_flags_start_anew(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "1 2 3"}\n' * 5000 + b'{"text": "7 7"}\n')
    with pytest.raises(UserError, match="is kept"):
        run(tmp_path, [tmp_path / "in.jsonl"], Mortal(tmp_path), workers=1)
    warnings: list[str] = []
    run(tmp_path, [tmp_path / "in.jsonl"], Mortal(tmp_path), warnings=warnings, workers=1, append_eod=True)
    assert "left by a killed run with other input or flags" in warnings[0] and len(warnings) == 1


def test_a_killed_worker_is_named(tmp_path):
    class Deadly(NullTokenizer):
        def encode_texts(self, texts):
            if texts != [""]:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().encode_texts(texts)

    (tmp_path / "in.jsonl").write_bytes(b'{"text": "1 2 3"}\n' * 20_000)
    with pytest.raises(UserError, match=r"a worker was ended by signal 9; .*fewer --workers; nothing was written"):
        run(tmp_path, [tmp_path / "in.jsonl"], Deadly(9), workers=2)
    assert nothing_under(tmp_path)


def test_an_error_of_ours_shows_where(tmp_path):
    class Broken(NullTokenizer):
        def encode_texts(self, texts):
            if texts != [""]:
                raise ZeroDivisionError("planted")
            return super().encode_texts(texts)

    with pytest.raises(RuntimeError, match=r"(?s)a worker failed:.*in encode_texts.*ZeroDivisionError: planted"):
        run(tmp_path, tokenizer=Broken(9))


def test_a_full_disk_is_named(tmp_path):
    """The limit on file sizes stands in for a disk that is full."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "1 2 3"}\n' * 20_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with pytest.raises(UserError, match=r"File too large; the finished part is kept in .*out.preparing"):
            run(tmp_path, [path], NullTokenizer(9), workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.glob("out*"))
    run(tmp_path, [path], NullTokenizer(9), workers=2)
    assert documents(tmp_path) == [[[1, 2, 3]]] * 20_000


def test_an_output_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    config = PreparationConfig(input=[CORPUS], output_prefix=str(tmp_path / "file/out"))
    with pytest.raises(UserError, match=r"--output-prefix .*file/out: .*file"):
        prepare(config, BPE, Console(file=io.StringIO()), print)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "arrow"])
def test_objects_in_a_store_give_the_bytes_of_local_files(tmp_path, kind):
    store = fsspec.filesystem("memory")
    folder = f"memory://prepare-{kind}"
    lines = Path(CORPUS).read_bytes().splitlines(keepends=True)
    for number, part in enumerate((lines[:40], lines[40:])):
        write_object(store, f"{folder}/part-{number}.{kind}", part)
    store.pipe_file(f"{folder}/.hidden.{kind}", b"")
    store.pipe_file(f"{folder}/README.md", b"no data")
    for number, source in enumerate((folder, f"{folder}/part-*", f"{folder}/**/*.{kind}")):
        place = tmp_path / str(number)
        place.mkdir()
        run(place, [source], workers=2, append_eod=True)
        assert output(place) == golden("gpt2_eod_text")


def write_object(store, url, lines):
    if kind := {"parquet": pyarrow.parquet.write_table, "arrow": write_arrow}.get(url.rsplit(".", 1)[-1]):
        with store.open(url, "wb") as file:
            kind(pyarrow.table({"text": [json.loads(line)["text"] for line in lines]}), file)
    else:
        content = b"".join(lines)
        store.pipe_file(url, gzip.compress(content) if url.endswith("gz") else content)


def write_arrow(table, file):
    with pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def test_stores_that_cannot_be_read_are_named(tmp_path):
    for source in ("memory://prepare-none", "memory://prepare-none/*.jsonl", "memory://prepare-none.jsonl"):
        with pytest.raises(UserError, match=re.escape(f"--input {source}: no such file")):
            run(tmp_path, [source])
    fsspec.filesystem("memory").pipe_file("memory://prepare-bad/a.parquet", b"PAR1 and no more")
    with pytest.raises(UserError, match=r"memory://.*prepare-bad/a.parquet: damaged, or no Parquet file"):
        run(tmp_path, ["memory://prepare-bad"])
    with pytest.raises(UserError, match=r"none3://a/b: .*no kind of store that fsspec knows"):
        run(tmp_path, ["none3://a/b"])
    assert nothing_under(tmp_path)
