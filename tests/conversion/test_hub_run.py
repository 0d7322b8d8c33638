"""--load-hf and --save-hf-interval: a run from a Hugging Face folder to Hugging Face folders."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conversion import test_bert, test_t5
from conversion.oracles import MODELS, logits_of, make_model, save_model
from conversion.test_against_transformers import tensors_of
from conversion.test_gradients import ORACLES
from safetensors.torch import load_file, save_file
from support.processes import run_on_ranks
from support.runs import state_at_end, state_at_start, train, train_on_ranks
from torch.nn.functional import cross_entropy

import pretrain_bert
import pretrain_t5
from megatron.conversion.families import FAMILIES
from megatron.conversion.hub_run import check_rows, take_hub_args
from megatron.conversion.importing import import_model, open_hub_model
from megatron.core.exceptions import UserError
from megatron.data.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.arguments import configure
from megatron.training.config.command_line import read_command_line
from megatron.training.config.resolution import ConfigurationError
from megatron.training.providers import Providers
from pretrain_gpt import build_model

CORPUS = Path(__file__).parents[1] / "data/golden/corpus"

BASE = (
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --num-workers 0 --log-interval 100 --seq-length 16 "
    "--eval-iters 0 --mock-data --train-iters 2 --tokenizer-type NullTokenizer --vocab-size 98"
)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama 2", torch.float32), tmp_path_factory.mktemp("llama") / "theirs")


def flags_of(folder: Path) -> str:
    words = open_hub_model(folder, folder, (), FAMILIES, lambda text: None).flags
    tokenizer = words.index("--tokenizer-type")
    return f"{BASE} {' '.join(words[:tokenizer])}"


def imported(folder: Path, root: Path) -> dict[str, torch.Tensor]:
    """The weights as the tool imports them, by canonical name."""
    import_model(folder, root, build_model, log=lambda text: None)
    return state_at_start([train(f"--pretrained-checkpoint {root} --train-iters 1", base=flags_of(folder))])


def weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.flatten() for name, tensor in state.items() if name.startswith("weight ")}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) > 10
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_run_begins_with_the_weights(theirs: Path, tmp_path: Path) -> None:
    """In float32, and in bfloat16 with main weights: weights are rounded, main weights are not."""
    run = train(f"--load-hf {theirs} --train-iters 1", base=flags_of(theirs))
    expected = weights(imported(theirs, tmp_path / "imported"))
    assert_equal(weights(state_at_start([run])), expected)
    state = state_at_start([train(f"--load-hf {theirs} --bf16 --train-iters 1", base=flags_of(theirs))])
    assert_equal(weights(state), {name: tensor.bfloat16() for name, tensor in expected.items()})
    masters = {name.removeprefix("optimizer.param."): tensor for name, tensor in state.items() if ".param." in name}
    assert_equal({f"weight {name}": tensor.flatten() for name, tensor in masters.items()}, expected)


def test_a_tokenizer_of_the_run_has_all_rows_of_a_folder_without_one(theirs: Path) -> None:
    rows = open_hub_model(theirs, theirs, (), FAMILIES, lambda text: None).vocab_size
    own = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "x"]
    for given, size in (([], rows - 1), (own, rows), (["--vocab-file", "x"], rows)):
        line = read_command_line(["--load-hf", str(theirs), *given])
        take_hub_args(line)
        assert line.values["vocab_size"] == size and not line.problems


@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", "--use-distributed-optimizer"])
def test_every_layout_begins_with_the_weights(theirs: Path, tmp_path: Path, layout: str) -> None:
    ranks = train_on_ranks(f"--load-hf {theirs} {layout} --train-iters 1", 2, base=flags_of(theirs))
    assert_equal(weights(state_at_start(ranks)), weights(imported(theirs, tmp_path / "imported")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["cohere with norms of heads", "nemotron h, tied", "qwen 3 moe", "gpt 2", "qwen 3 next"]
)
def test_tensor_parallel_ranks_begin_with_the_weights(name: str, tmp_path: Path) -> None:
    theirs = save_model(make_model(name, torch.float32), tmp_path / "theirs")
    flags = f"--load-hf {theirs} --tensor-model-parallel-size 2 --sequence-parallel --train-iters 1"
    ranks = train_on_ranks(flags, 2, base=flags_of(theirs))
    assert_equal(weights(state_at_start(ranks)), weights(imported(theirs, tmp_path / "imported")))


def test_folders_beside_checkpoints_and_a_run_that_goes_on(theirs: Path, tmp_path: Path, capsys: Any) -> None:
    save = f"--save {tmp_path / 'run'} --load {tmp_path / 'run'} --save-interval 1 --save-hf-interval 2"
    first = train(f"--load-hf {theirs} {save}", base=flags_of(theirs))
    shown = capsys.readouterr().out
    assert f"loaded the weights of {theirs}" in shown and "exported LlamaForCausalLM to " in shown
    assert [path.name for path in (tmp_path / "run/hf").iterdir()] == ["iter_0000002"]
    again = train(f"--load-hf {tmp_path / 'run/hf/iter_0000002'} --train-iters 1", base=flags_of(theirs))
    assert_equal(weights(state_at_start([again])), weights(first.at_end))
    capsys.readouterr()
    more = "--train-iters 3 --override-opt-param-scheduler"
    going = train(f"--load-hf {theirs} {save} {more}", base=flags_of(theirs))
    assert going.at_start["state"]["iteration"] == 2 and "loaded the weights of" not in capsys.readouterr().out


def test_flags_of_the_model_are_taken(theirs: Path, tmp_path: Path) -> None:
    line = read_command_line(["--load-hf", str(theirs), "--num-layers", "9", "--seq-length", "8"])
    take_hub_args(line)
    assert line.problems == [
        f"--load-hf: --num-layers is 9 in this run and 3 in {theirs}; leave --num-layers out to take the latter"
    ]
    line = read_command_line(["--load-hf", str(theirs), "--attention-dropout", "0.2", "--seq-length", "8"])
    take_hub_args(line)
    assert not line.problems and line.values["num_layers"] == 3 and line.values["hidden_size"]
    assert line.values["attention_dropout"] == 0.2 and line.values["seq_length"] == 8
    line = read_command_line(["--load-hf", str(tmp_path / "none")])
    take_hub_args(line)
    assert line.problems == [f"--load-hf: {tmp_path / 'none'}: no such folder"]
    shutil.copytree(theirs, tmp_path / "other")
    config = json.loads((theirs / "config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps(config | {"own_key": 3}))
    line = read_command_line(["--load-hf", str(tmp_path / "other")])
    take_hub_args(line)
    assert any("own_key is not known for LlamaForCausalLM" in problem for problem in line.problems)


def test_a_model_that_is_not_known_is_the_only_problem(tmp_path: Path) -> None:
    """The sizes would come from it, so that none is missing."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OwnModel"], "model_type": "own"}))
    words = ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "1", "--mock-data"]
    with pytest.raises(ConfigurationError) as error:
        configure(["--load-hf", str(tmp_path), *words], take_flags=take_hub_args)
    (problem,) = error.value.problems
    assert problem.startswith(f"--load-hf: {tmp_path / 'config.json'}: architectures: OwnModel")


def test_wrong_models_and_weights_are_named(theirs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is another model than the run's: .*--ffn-hidden-size"):
        train(f"--load-hf {theirs} --ffn-hidden-size 24", base=flags_of(theirs))
    shutil.copytree(theirs, tmp_path / "broken")
    file = tmp_path / "broken/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"model.norm.weight has values that are NaN or infinite"):
        train(f"--load-hf {tmp_path / 'broken'}", base=flags_of(theirs))
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"model.norm.weight is missing"):
        train(f"--load-hf {tmp_path / 'broken'}", base=flags_of(theirs))


def test_a_tokenizer_with_more_ids_than_rows_is_named(theirs: Path) -> None:
    with pytest.raises(UserError, match=r"has 99 rows, .* NullTokenizer needs 151; give --vocab-size 98 or less"):
        train(f"--load-hf {theirs}", base=flags_of(theirs).replace("--vocab-size 98", "--vocab-size 150"))


@pytest.mark.parametrize(
    ("ids", "own", "advice"),
    [
        (50, "NullTokenizer", "leave --vocab-size 200 out"),
        (200, "NullTokenizer", "give the tokenizer that the model was trained with"),
        (200, "HuggingFaceTokenizer", "leave --tokenizer-type out"),
    ],
)
def test_advice_for_too_few_rows_fits_the_cause(ids: int, own: str, advice: str) -> None:
    flags = SimpleNamespace(family="GPT2BPETokenizer", vocab_size=200)
    run: Any = SimpleNamespace(
        vocab_size=200, tokenizer=SimpleNamespace(vocab_size=ids), config=SimpleNamespace(tokenizer=flags)
    )
    hub: Any = SimpleNamespace(vocab_size=99, flags=["--tokenizer-type", own], folder=SimpleNamespace(path="x"))
    with pytest.raises(UserError, match=f"has 99 rows, .* GPT2BPETokenizer needs 200; {advice}"):
        check_rows(run, hub)


def test_an_empty_folder_is_one_problem() -> None:
    line = read_command_line(["--load-hf", ""])
    take_hub_args(line)
    assert line.problems == []  # that of the empty path comes with the checks


def test_what_cannot_be_exported_is_told_before_the_first_step(theirs: Path, tmp_path: Path) -> None:
    save = f"--save {tmp_path} --save-interval 1 --save-hf-interval 1"
    with pytest.raises(UserError, match=r"--save-hf-interval: "):
        train(f"{save} --clip-qkv 3", base=flags_of(theirs))
    with pytest.raises(UserError, match=r"--save-hf-interval 3: give a multiple of --save-interval"):
        train(f"--save {tmp_path} --save-interval 2 --save-hf-interval 3", base=flags_of(theirs))


LENGTH, SAMPLES = 16, 8
CLASSES = [name for name in ORACLES if name in MODELS]


@pytest.mark.fast("llama 2", "gpt-oss")
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_is_validated_trained_and_exported(name: str, tmp_path: Path) -> None:
    """The validation loss is that of transformers, and a run from the exported folder begins where the first ended."""
    oracle = make_model(name)
    theirs = save_model(oracle, tmp_path / "theirs")
    text = torch.randint(98, (LENGTH * SAMPLES + 1,), generator=torch.Generator().manual_seed(2))
    with IndexedDatasetBuilder(f"{tmp_path}/text.bin", dtype=np.uint16) as builder:
        builder.add_document(text.numpy(), [len(text)])
        builder.finalize(f"{tmp_path}/text.idx")
    flags = flags_of(theirs).replace("--mock-data", "") + " --fp64"
    data = f"--eval-iters 1 --valid-data-path {tmp_path}/text --data-cache-path {tmp_path}/cache"
    run = train(f"--load-hf {theirs} --skip-train --full-validation {data}", base=flags)
    rows = text[:-1].view(SAMPLES, LENGTH)
    expected = cross_entropy(logits_of(oracle, rows).flatten(0, 1), text[1:])
    (found,) = (record.losses["lm loss"] for record in run.validations if record.split == "validation")
    assert abs(found - expected) < 1e-9

    save = f"--save {tmp_path}/run --save-interval 1 --save-hf-interval 1 --mock-data --train-iters 1"
    trained = train(f"--load-hf {theirs} {save}", base=flags)
    assert len(trained.losses) == 1
    exported = tmp_path / "run/hf/iter_0000001"
    again = train(f"--load-hf {exported} --train-iters 1 --mock-data", base=flags)
    assert_equal(weights(state_at_start([again])), weights(state_at_end([trained])))


PARTS = 8
WHOLE_RUN = "--train-iters 3 --lr-decay-style constant --override-opt-param-scheduler"


def exported_by(jobs: list[tuple[Path, str]]) -> list[str]:
    """Runs each of these flags after those of its folder; returns the problems."""
    problems = []
    for folder, flags in jobs:
        try:
            train(f"--load-hf {folder / 'theirs'} {flags} {WHOLE_RUN}", base=f"{flags_of(folder / 'theirs')} --fp64")
        except UserError as error:  # the same on all ranks
            problems.append(f"{folder.name}: {error}")
    return problems


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_goes_through_layouts(part: int, tmp_path: Path) -> None:
    """Two steps on tensor and pipeline parallel ranks, and one with data or expert parallel ones from their checkpoint,
    export what three steps of one process export. The folders that they begin with are sharded, without settings."""
    alone, split, resumed = [], [], []
    for name in CLASSES[part::PARTS]:
        folder = tmp_path / name.replace(" ", "-")
        theirs = save_model(make_model(name), folder / "theirs", max_shard_size="60KB")
        (theirs / "generation_config.json").unlink(missing_ok=True)
        words = flags_of(theirs).split()
        layers = int(words[words.index("--num-layers") + 1])
        run = f"--save {folder}/run"
        uneven = f"--decoder-first-pipeline-num-layers {layers // 2 + 1}" if layers % 2 else ""
        grid = f"--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 {uneven}"
        experts = "--expert-model-parallel-size 2" if "--num-experts" in words else ""
        alone.append((folder, f"--save {folder}/alone --save-interval 3 --save-hf-interval 3"))
        split.append((folder, f"{grid} {run} --save-interval 2 --exit-interval 2"))
        export = "--save-interval 1 --save-hf-interval 1"
        resumed.append((folder, f"--use-distributed-optimizer {experts} {run} --load {folder}/run {export}"))
    for size, jobs in ((1, alone), (4, split), (2, resumed)):
        problems = run_on_ranks(exported_by, size, jobs)
        assert problems == [[]] * size, problems[0]
    for folder, _ in alone:
        expected = tensors_of(folder / "alone/hf/iter_0000003")
        found = tensors_of(folder / "run/hf/iter_0000003")
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-9, rtol=0, msg=f"{folder.name}: {key}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BertForPreTraining", "ModernBERT", "T5", "mT5"])
def test_encoders_are_validated_trained_and_exported(name: str, tmp_path: Path) -> None:
    script = pretrain_t5 if name in test_t5.MODELS else pretrain_bert
    rows = {"vocab_size": 550}  # as many as the tokenizer needs
    if name in test_t5.MODELS:
        kind, settings = test_t5.MODELS[name]
        test_t5.save_random(tmp_path / "theirs", kind, settings | rows)
        more = "--decoder-seq-length 16 --vocab-extra-ids 20"
    else:
        kind, settings = test_bert.MODELS[name]
        test_bert.save_random(kind, tmp_path / "theirs", **settings | rows)
        more = ""
    providers = Providers(script.build_model, script.build_datasets, script.build_forward_step)
    tokenizer = f"--tokenizer-type BertWordPieceLowerCase --vocab-file {CORPUS}/bert/vocab.txt --vocab-size 550"
    base = BASE.replace("--mock-data", "").replace("--tokenizer-type NullTokenizer --vocab-size 98", tokenizer)
    words = open_hub_model(tmp_path / "theirs", tmp_path, (), FAMILIES, lambda text: None).flags
    flags = (
        f"{base} --fp64 {' '.join(words[: words.index('--tokenizer-type')])} --data-cache-path {tmp_path}/cache {more}"
    )

    def run(folder: Path, more: str) -> Any:
        return train(f"--load-hf {folder} {more}", providers, base=flags, defaults=script.DEFAULTS)

    data = f"{CORPUS}/pp/bert_body_document"
    evaluation = f"--skip-train --full-validation --eval-iters 1 --valid-data-path {data}"
    (first,) = run(tmp_path / "theirs", evaluation).validations
    save = (
        f"--save {tmp_path}/run --save-interval 1 --save-hf-interval 1 --train-iters 1 --data-path {data} --split 9,1,0"
    )
    trained = run(tmp_path / "theirs", save)
    exported = tmp_path / "run/hf/iter_0000001"
    again = run(exported, f"--train-iters 1 --data-path {data} --split 9,1,0")
    assert_equal(weights(state_at_start([again])), weights(state_at_end([trained])))
    (second,) = run(exported, evaluation).validations
    assert first.losses.keys() == second.losses.keys() and first.losses != second.losses
