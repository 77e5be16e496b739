"""How much to think, in the words of a chat template; what a template cannot do is refused with what it can."""

import pytest

from rlx.config.chat import ChatConfig
from rlx.envs.chat import load_chat_tokenizer
from rlx.envs.thinking import thinking_variables
from tests.tiny_tokenizer import build

SWITCH = "{% if enable_thinking is defined and enable_thinking is false %}"
EFFORT = "Effort: {{ reasoning_effort }}"
NONE = "{{ messages }}"
ALWAYS = "assistant\n<think>\n"  # how a prompt ends


@pytest.mark.parametrize(
    "wanted, template, prompt, variables",
    [
        ("off", NONE, "", {}),
        ("off", SWITCH, "", {"enable_thinking": False}),
        ("max", SWITCH, "", {"enable_thinking": True}),
        ("low", EFFORT, "", {"reasoning_effort": "low"}),
        ("high", EFFORT + SWITCH, "", {"reasoning_effort": "high", "enable_thinking": True}),
        ("max", "{{ thinking }}", "", {"thinking": True}),
        ("max", NONE, ALWAYS, {}),
    ],
)
def test_a_template_is_asked_in_its_own_words(wanted, template, prompt, variables):
    assert thinking_variables(wanted, template, prompt, has_token=True) == variables


@pytest.mark.parametrize(
    "wanted, template, prompt, said",
    [
        ("off", EFFORT, "", "always thinks; set 'low', 'high' or 'max'"),
        ("off", NONE, ALWAYS, "always thinks; set 'max'"),
        ("low", SWITCH, "", "can switch thinking on and off and knows no effort; set 'max' or 'off'"),
        ("low", NONE, "", "knows no thinking; set 'off'"),
        ("max", NONE, "", "knows no thinking; set 'off'"),
    ],
)
def test_what_it_cannot_is_refused(wanted, template, prompt, said):
    with pytest.raises(ValueError, match=said):
        thinking_variables(wanted, template, prompt, has_token=True)


def test_a_tokenizer_without_the_token_does_not_think(tmp_path):
    directory = build(tmp_path)
    chat = load_chat_tokenizer(directory, "", "", ChatConfig("chatml", "off"))
    assert chat.render_prompt("?").endswith("<|im_start|>assistant\n")
    with pytest.raises(ValueError, match=r"chat.thinking = 'max': the chat template for .* knows no thinking"):
        load_chat_tokenizer(directory, "", "", ChatConfig("checkpoint", "max"))


def test_our_template_needs_its_tokens(tmp_path):
    directory = build(tmp_path)
    for file in tmp_path.iterdir():
        file.write_text(file.read_text().replace("<|im_start|>", "<|begin|>"))
    with pytest.raises(ValueError, match=r"chat.template = 'chatml' writes <\|im_start\|>, which the tokenizer in"):
        load_chat_tokenizer(directory, "", "", ChatConfig("chatml", "off"))
