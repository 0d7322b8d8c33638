"""The specification that people fill in, in its forms: text, Markdown, YAML; what is missing and what is wrong."""

import json

import pytest
import yaml

from megatron.core.exceptions import UserError
from megatron.diagnosis.planning.questions import questions, tokenizer_ids
from megatron.diagnosis.planning.specification import LossCheck, Packing, Specification, read_specification
from megatron.diagnosis.planning.specification_text import KEYS, read_answers
from tests.diagnosis.planning.specifications import SPECIFICATION, specification


def read(text: str, name: str = "spec.txt") -> Specification:
    return read_specification(read_answers(name, text))


def values(found: Specification) -> dict[str, object]:
    return {name: value for name, value in found.__dict__.items() if name != "where"}


def test_all_values_of_a_text() -> None:
    found = read(SPECIFICATION)
    assert (found.params.value, found.vocab_size, found.seq_length, found.gpus) == (7e9, 32000, 4096, 64)
    assert (found.gpus_per_node, found.gpu, found.zero_stage, found.packing) == (8, "H100 80GB", 1, Packing(False))
    assert (found.tensor_parallel, found.pipeline_parallel, found.data_parallel) == (None, None, None)
    assert (found.tokenizer.name, found.tokenizer.vocab_size) == ("Llama 2", 32000)
    assert [(source.name, source.ratio) for source in found.data_mix] == [("web", 0.7), ("code", 0.2), ("books", 0.1)]
    assert (found.tokens, found.throughput, found.checkpoint_interval) == (140_000_000_000, 9000, 500)
    assert (found.memory_utilization, found.deduplication, found.objective) == (0.85, "minhash", "causal")
    assert found.cite("tokens") == "specification, Total tokens (spec.txt:26)"


def test_forms_of_the_same_text_read_alike() -> None:
    expected = values(read(SPECIFICATION))
    markdown = "".join(
        f"## {line.title()} [one cluster, filled in by us]\n"
        if line.isupper()
        else f"- **{line.replace(':', ':**', 1)}\n"
        for line in SPECIFICATION.splitlines()
        if line
    )
    assert values(read("Fill this in.\n\n" + markdown)) == expected
    assert values(read(SPECIFICATION.lower().replace("llama", "Llama").replace("h100 80gb", "H100 80GB"))) == {
        **expected,
        "architecture": "Llama-style decoder-only",
        "framework": "megatron-lm's flags",
        "interconnect": "nvlink intra-node, infiniband ndr inter-node",
    }
    assert values(read(SPECIFICATION.replace("Tokenizer:", "Tokenizer (name and vocabulary size):"))) == expected
    assert values(read(SPECIFICATION.replace("\n", "\r\n"))) == expected


def as_yaml() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    heading = ""
    for line in filter(None, SPECIFICATION.splitlines()):
        key, colon, value = line.partition(": ")
        if colon:
            found[heading][key] = int(value) if value.isdigit() else value
        else:
            heading = key
            found[heading] = {}
    return found


def test_yaml_and_json_read_alike() -> None:
    content, expected = as_yaml(), values(read(SPECIFICATION))
    assert values(read(yaml.safe_dump(content, sort_keys=False), "spec.yaml")) == expected
    assert values(read(json.dumps(content, indent=1), "spec.json")) == expected
    content["DATA PIPELINE"]["Data mix"] = {"web": 0.7, "code": 0.2, "books": 0.1}
    content["PARALLELISM"]["Tensor parallelism"] = None
    assert values(read(yaml.safe_dump(content, sort_keys=False), "spec.yml")) == expected
    flat = {key: value for section in content.values() for key, value in section.items()}
    assert values(read(yaml.safe_dump(flat, sort_keys=False), "spec.yml")) == expected


@pytest.mark.parametrize("value", ["[your GPU count]", "", "<number>", "TBD", "...", "?"])
def test_a_place_holder_is_not_specified(value: str) -> None:
    found = read(specification(total_gpus=value))
    assert found.gpus is None
    assert list(questions(found)) == ["How many GPUs are there in all, such as 64 (Total GPUs, --gpus)?"]


def test_what_must_be_asked_for() -> None:
    asked = list(questions(read("")))
    assert len(asked) == 6 and all(question.endswith("?") for question in asked)
    assert list(questions(read(SPECIFICATION))) == []
    (question,) = questions(read(specification(tokenizer="our own BPE", vocabulary=None)))
    assert question == "How many ids has the tokenizer our own BPE (Vocabulary size, --vocab-size)?"
    (question,) = questions(read(specification(gpu_type="A100")))
    assert question.startswith("How much memory has the A100") and question.endswith("?")
    assert not list(questions(read(specification(parameter="7B", vocabulary=None, tokenizer="Llama 3"))))


@pytest.mark.parametrize(
    ("name", "ids"),
    [("Llama 3", 128256), ("meta-llama/Llama-3.1-8B", 128256), ("GPT-2 BPE", 50257), ("gpt2", 50257), ("BPE", None)],
)
def test_sizes_of_known_tokenizers(name: str, ids: int | None) -> None:
    assert tokenizer_ids(read(specification(tokenizer=name))) == ids


@pytest.mark.parametrize(
    ("text", "method"),
    [("exact-match", "exact-match"), ("MinHash LSH", "minhash"), ("both", "both"), ("exact + MinHash", "both"),
     ("none", "none"), ("SHA-256 of lines", "exact-match")],
)  # fmt: skip
def test_deduplication(text: str, method: str) -> None:
    assert read(specification(deduplication=text)).deduplication == method


@pytest.mark.parametrize(
    "text",
    ["web: 0.7, code: 0.2, books: 0.1", "0.7 web + 0.2 code + 0.1 books", "web (70%), code (20%), books (10%)",
     "70/20/10 web/code/books", "web 70, code 20 and books 10"],
)  # fmt: skip
def test_data_mixes(text: str) -> None:
    assert [(source.name, source.ratio) for source in read(specification(data_mix=text)).data_mix] == [
        ("web", 0.7),
        ("code", 0.2),
        ("books", 0.1),
    ]


@pytest.mark.parametrize(
    ("text", "packing"),
    [("yes", Packing(True)), ("Yes (dynamic context parallelism)", Packing(True, True)),
     ("yes, no dynamic context parallelism", Packing(True)), ("no", Packing(False))],
)  # fmt: skip
def test_packing(text: str, packing: Packing) -> None:
    assert read(specification(sequence_packing=text)).packing == packing


@pytest.mark.parametrize(
    ("text", "step", "most"),
    [("below 3.2 at step 1000 on a validation subset", 1000, 3.2), ("2.5 at step 1,000", 1000, 2.5),
     ("loss at step 500: 3", 500, 3.0), ("after 2k steps between 2.4 and 2.6", 2000, 2.6), ("<= 4", None, 4.0),
     ("it falls in the first 300 steps with 3 spikes at most", 300, None), ("falls steeply", None, None),
     ("no more than 2 spikes in 500 steps", 500, None)],
)  # fmt: skip
def test_loss_checks(text: str, step: int | None, most: float | None) -> None:
    assert read(specification(loss_curve=text)).loss_check == LossCheck(text, step, most)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_packing": "no, but dynamic context parallelism"}, "needs packed documents"),
        ({"loss_curve": "below 320 at step 100"}, "expected a loss and a step"),
        ({"data_mix": "70% web, 20% code"}, r"spec.txt:25: Data mix .*add up to 90, not 100; nearest: web 77.78%"),
        ({"data_mix": "70% web, lots of code"}, r"'lots of code' is no source with its ratio"),
        ({"data_mix": "50% web, 50% web"}, "named twice"),
        ({"total_gpus": "some"}, r"spec.txt:10: Total GPUs some: expected a number above 0"),
        ({"total_gpus": "2.5"}, "2 or 3 works"),
        ({"zero": "4"}, "expected 1, 2 or 3"),
        ({"training_objective": "diffusion"}, "causal LM or masked LM"),
        ({"deduplication": "bloom"}, "exact-match, MinHash, both or none"),
        ({"max_memory": "300%"}, "percentage"),
        ({"throughput": "400 TFLOPS"}, "tokens per second and GPU"),
    ],
)
def test_values_that_cannot_be_read(change: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(specification(**change))
    assert len(str(caught.value).splitlines()) == 1


def test_all_wrong_values_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        read(specification(total_gpus="some", zero="9", max_memory="300%"))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SPECIFICATION.replace("HARDWARE", "HARDWERE"), "spec.txt:9: .*no heading HARDWERE; nearest: HARDWARE"),
        (SPECIFICATION.replace("Total GPUs", "Totl GPUs"), "spec.txt:10: .*'Totl GPUs'; nearest: Total GPUs"),
        (SPECIFICATION + "GPUs: 32\n", "spec.txt:33: Total GPUs is 32 here and 64 in spec.txt:10; give it once"),
    ],
)
def test_lines_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "spec.yaml:1: neither YAML nor JSON"),
        ("- 1", "expected keys and values"),
        ("Total GPUs: {a: {b: c}}", "expected a value"),
        ("HARDWARE: 3", "expected keys and values under HARDWARE"),
        ("Colour: red", "no key 'Colour'"),
        ("[1]: 2", "expected a key"),
    ],
)
def test_yaml_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(text, "spec.yaml")


def test_lines_of_prose_are_noted() -> None:
    answers = read_answers("spec.txt", "We train a model.\n" + SPECIFICATION)
    assert answers.notes == ("spec.txt:1: not read, as it is no heading and no `key: value`: We train a model.",)


def test_keys_are_the_fields() -> None:
    assert [key.field for key in KEYS] == [name for name in Specification.__dataclass_fields__ if name != "where"]
