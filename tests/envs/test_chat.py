import subprocess
import sys

import numpy as np
import pytest

from rlx.envs.chat import load_chat_tokenizer
from tests import tiny_tokenizer
from tests.tiny_tokenizer import END_OF_TEXT, IM_END, IM_START, PAD, build

NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build(tmp_path_factory.mktemp("tokenizer"))


def test_a_prompt_is_system_question_suffix_and_the_opening_of_the_answer(directory):
    chat = load_chat_tokenizer(directory, "Be brief.", " Answer:")
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1? Answer:<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.render_prompt("1 + 1?") == expected
    ids = chat.encode_prompt("1 + 1?")
    assert ids.dtype == np.int32
    assert (ids[0], np.sum(ids == IM_START), np.sum(ids == IM_END)) == (IM_START, 3, 2)
    assert chat.decode(ids) == expected.replace("<|im_start|>", "").replace("<|im_end|>", "")


def test_without_a_system_prompt_no_system_message_is_given(directory):
    assert load_chat_tokenizer(directory, "", "").render_prompt("1?").startswith("<|im_start|>user\n1?<|im_end|>")


def test_an_example_continues_its_prompt_and_is_masked_on_the_response(directory):
    chat = load_chat_tokenizer(directory, "", "")
    ids, mask = chat.encode_example("1 + 1?", "It is 2 , é.")
    prompt = chat.encode_prompt("1 + 1?")
    np.testing.assert_array_equal(ids[~mask], prompt)
    np.testing.assert_array_equal(mask, np.arange(ids.size) >= prompt.size)
    assert ids[-1] == IM_END
    assert chat.decode(ids[mask]) == "It is 2 , é."


@pytest.mark.parametrize(
    "arguments, stop, end_of_turn",
    [
        ({}, (END_OF_TEXT, IM_END), IM_END),
        ({"generation_eos": PAD}, (END_OF_TEXT, IM_END, PAD), IM_END),
        ({"generation_eos": [IM_END, PAD], "eos_token": None}, (IM_END, PAD), IM_END),
        ({"template": "{{ messages[-1]['content'] }}"}, (END_OF_TEXT,), END_OF_TEXT),
        ({"template": "{{ messages[-1]['content'] + '\n' + eos_token }}"}, (END_OF_TEXT,), END_OF_TEXT),
    ],
)
def test_whatever_ends_a_turn_stops_a_response(tmp_path, arguments, stop, end_of_turn):
    chat = load_chat_tokenizer(build(tmp_path, **arguments), "", "")
    assert (chat.stop_token_ids, chat.end_of_turn_id) == (stop, end_of_turn)


@pytest.mark.parametrize(
    "arguments, system_prompt, message",
    [
        ({"template": None}, "", "has no chat template, .* take the instruct version's"),
        ({"template": NO_SYSTEM}, "Be brief.", r"refuses a system message \(no system role here\): set tasks.system"),
        ({"template": "{{ raise_exception('never') }}"}, "", "cannot render a question: never"),
        ({"template": "{{ messages[-1]['content'] }}", "eos_token": None}, "", "nothing ends a response"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_to_do(tmp_path, arguments, system_prompt, message):
    with pytest.raises(ValueError, match=message):
        load_chat_tokenizer(build(tmp_path, **arguments), system_prompt, "")


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no tokenizer in"):
        load_chat_tokenizer(str(tmp_path), "", "")


def test_half_a_surrogate_pair_is_a_question_mark(directory):
    tokenizer = load_chat_tokenizer(directory, "", "")
    np.testing.assert_array_equal(tokenizer.encode("a\ud800"), tokenizer.encode("a?"))


def test_ids_are_below_the_vocabulary_size(directory):
    chat = load_chat_tokenizer(directory, "", "")
    ids = chat.encode_prompt("".join(map(chr, range(32, 0x250))))
    assert chat.vocab_size == tiny_tokenizer.VOCAB_SIZE > ids.max()


def test_the_host_side_imports_quietly_and_without_jax():
    code = (
        "import sys, rlx.envs.chat, rlx.envs.graders, rlx.envs.tasks\n"
        "assert not {'jax', 'torch', 'tensorflow'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert (run.returncode, run.stderr, run.stdout) == (0, "", "")
