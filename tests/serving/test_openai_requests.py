"""Bodies of requests: what is read from them, and one clear error for each mistake."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron.core.inference.sampling import SamplingParams
from megatron.data.tokenizer.null import NullTokenizer
from megatron.data.tokenizer.sft import SFTTokenizer
from megatron.serving.http_server import HttpError
from megatron.serving.openai_requests import Prompt, ServedModel, read_chat, read_completion

FOLDER = Path(__file__).parents[1] / "data/golden/corpus/hf"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}<assistant>"
MODEL = ServedModel("small", NullTokenizer(36), None, "it has no template", 36, (35,), (35,), 100, 8)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    template = tmp_path_factory.mktemp("chat") / "chat.jinja"
    template.write_text(TEMPLATE)
    tokenizer = SFTTokenizer(str(FOLDER), chat_template=str(template))
    return dataclasses.replace(MODEL, tokenizer=tokenizer, chat=tokenizer, vocab_size=tokenizer.vocab_size)


def completion(**fields):
    return read_completion(json.dumps({"prompt": "1 2", **fields}).encode(), MODEL)


def test_defaults_are_those_of_openai() -> None:
    found = completion()
    assert found.prompts == (Prompt((1, 2), "1 2"),) and found.max_new_tokens == 16 and found.choices == 1
    assert (found.stops, found.num_logprobs, found.echo, found.stream) == ((), None, False, False)
    sampling = dataclasses.replace(found.sampling, seed=1234)
    assert sampling == SamplingParams(top_p=1.0) and completion().sampling.seed != found.sampling.seed


def test_all_options() -> None:
    found = completion(
        model="small",
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        typical_p=0.8,
        epsilon_cutoff=0.01,
        eta_cutoff=0.02,
        seed=3,
        repetition_penalty=1.5,
        no_repeat_ngram_size=3,
        bad_words=["4 5"],
        min_tokens=2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"3": -100},
        stop=["a", "b"],
        n=2,
        logprobs=3,
        echo=True,
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=0,
        ignore_eos=True,
        user="me",
        suffix=None,
    )
    options = {"min_p": 0.1, "typical_p": 0.8, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02, "repetition_penalty": 1.5}
    counts = {"no_repeat_ngram_size": 3, "min_new_tokens": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    words = {"bad_words": ((4, 5),), "logit_bias": {3: -100.0}}
    assert found.sampling == SamplingParams(0.5, 7, 0.9, 3, **options, **counts, **words)
    assert (found.stops, found.choices, found.num_logprobs, found.max_new_tokens) == (("a", "b"), 2, 3, 0)
    assert found.echo and found.stream and found.includes_usage and found.ignores_ends
    assert completion(temperature=0).sampling.is_greedy and completion(top_p=0).sampling.top_p < 1e-6


def test_forms_of_prompts() -> None:
    assert completion(prompt=["1", "2 3"]).prompts == (Prompt((1,), "1"), Prompt((2, 3), "2 3"))
    assert completion(prompt=[1, 2]).prompts == (Prompt((1, 2), None),)
    assert completion(prompt=[[1], [2, 3]]).prompts == (Prompt((1,), None), Prompt((2, 3), None))
    assert completion(prompt="").prompts == (Prompt((MODEL.tokenizer.eod,), ""),)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": 5}, "prompt", "prompt must be a text"),
        ({"prompt": []}, "prompt", "prompt must be a text"),
        ({"prompt": [1, 36]}, "prompt", "from 0 to 35"),
        ({"prompt": [[1], []]}, "prompt", "at least one"),
        ({"prompt": [True]}, "prompt", "from 0 to 35"),
        ({"prompt": "word"}, "prompt", "NullTokenizer"),
        ({"max_tokens": 0}, "max_tokens", "from 1 to 1000000000, not 0"),
        ({"max_tokens": "9"}, "max_tokens", 'not "9"'),
        ({"max_tokens": 10**30}, "max_tokens", "from 1 to 1000000000, not 1000"),
        ({"temperature": -1}, "temperature", "from 0 to 100, not -1"),
        ({"temperature": True}, "temperature", "not true"),
        ({"top_p": 1.5}, "top_p", "from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be larger than 0"),
        ({"n": 1000}, "n", "from 1 to 128"),
        ({"best_of": 3}, "best_of", "equal to n"),
        ({"suffix": "x"}, "suffix", "leave it out"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stream": 1}, "stream", "true or false, not 1"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "with stream true"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids below 36"),
        ({"logit_bias": {"36": 1}}, "logit_bias", "token ids below 36"),
        ({"logit_bias": {"3": 101}}, "logit_bias", "from -100 to 100"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"model": "large"}, "model", "'large' is not served here; 'small' is"),
        ({"tempreature": 1}, "tempreature", "unknown fields: tempreature"),
    ],
)
def test_mistakes_are_named(fields: dict, param: str, message: str) -> None:
    with pytest.raises(HttpError) as caught:
        completion(**fields)
    assert caught.value.status == 400 and caught.value.param == param and message in caught.value.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON: Expecting value: line 1 column 1"),
        (b"[1]", "not a JSON object"),
        (b"\xff", "not UTF-8: byte 0"),
        (b'{"prompt": NaN}', "NaN is no JSON number"),
        (b'{"a":' * 100_000, "not JSON"),
        (b'{"prompt": "a\\ud800"}', "\\ud800 is half of a surrogate pair, no character"),
    ],
)
def test_bodies_that_are_no_objects(body: bytes, message: str) -> None:
    with pytest.raises(HttpError) as caught:
        read_completion(body, MODEL)
    assert caught.value.status == 400 and message in caught.value.message


def test_chats(chatting: ServedModel) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
    body = {"messages": messages, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2}
    found = read_chat(json.dumps(body).encode(), chatting)
    text = "<system>Be kind.<|endoftext|><user>Hi<|endoftext|><assistant>"
    assert chatting.tokenizer.detokenize(found.prompts[0].ids) == text and found.prompts[0].text is None
    assert (found.max_new_tokens, found.num_logprobs) == (9, 2)
    assert read_chat(json.dumps({"messages": messages}).encode(), chatting).max_new_tokens is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "at least one object"),
        ({"messages": [{"role": "user"}, {"content": "a"}]}, r"messages[1] must have a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages[0] must have"),
        ({"tools": [{}]}, "only text is written here"),
        ({"response_format": {"type": "json_object"}}, "no format here"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs true"),
    ],
)
def test_mistakes_in_chats(fields: dict, message: str, chatting: ServedModel) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(HttpError) as caught:
        read_chat(json.dumps(body).encode(), chatting)
    assert message in caught.value.message
    with pytest.raises(HttpError) as caught:
        read_chat(json.dumps(body).encode(), MODEL)
    assert "does not chat: it has no template; use /v1/completions" in caught.value.message
