"""How much to think, in the words of a chat template; what a template cannot do is refused with what it can."""

import jinja2
import pytest

from rlx.config.chat import ChatConfig
from rlx.envs.chat import load_chat_tokenizer
from rlx.envs.thinking import thinking_variables
from tests.tiny_tokenizer import build

OPENING = "{{ messages }} assistant\n"
OFF = "<think>\n\n</think>\n\n"
SWITCH = OPENING + "{% if enable_thinking is defined and not enable_thinking %}" + OFF + "{% endif %}"
OTHER = OPENING + "{% if thinking %}<think>\n{% else %}</think>{% endif %}"
EFFORT = "{{ reasoning_effort }}" + OPENING
COMMENT = "{# thinking: enable_thinking and reasoning_effort are not read #}" + OPENING
ALWAYS = OPENING + "<think>\n"
TWO = "{% if reasoning_effort == 'max' %}{{ raise('no') }}{% endif %}" + EFFORT
SILENT = "{% if thinking %}Think!{% endif %}" + OPENING


def refuse(reason):
    raise jinja2.TemplateError(reason)


def variables(wanted, template, has_token=True):
    compiled = jinja2.Template(template)
    render = lambda given: compiled.render(messages="?", **{"raise": refuse}, **given)  # noqa: E731
    return thinking_variables(wanted, render, has_token=has_token)


@pytest.mark.parametrize(
    "wanted, template, expected",
    [
        ("off", OPENING, {}),
        ("off", COMMENT, {}),
        ("off", SWITCH, {"enable_thinking": False}),
        ("off", OTHER, {"thinking": False}),
        ("max", SWITCH, {"enable_thinking": True}),
        ("low", EFFORT, {"reasoning_effort": "low"}),
        ("high", EFFORT + SWITCH, {"reasoning_effort": "high", "enable_thinking": True}),
        ("high", TWO, {"reasoning_effort": "high"}),
        ("max", OTHER, {"thinking": True}),
        ("max", ALWAYS, {}),
    ],
)
def test_a_template_is_asked_in_its_own_words(wanted, template, expected):
    assert variables(wanted, template) == expected


@pytest.mark.parametrize(
    "wanted, template, said",
    [
        ("off", EFFORT, "always thinks; set 'low', 'high' or 'max'"),
        ("off", ALWAYS, "always thinks; set 'max'"),
        ("off", SILENT, "leaves no empty think block where thinking is false; set 'max'"),
        ("max", TWO, "does not know this effort; set 'low' or 'high'"),
        ("low", SWITCH, "can switch thinking on and off and knows no effort; set 'max' or 'off'"),
        ("low", "{% if reasoning_effort %}Think!{% endif %}" + ALWAYS, "always thinks and knows no effort; set 'max'"),
        ("low", OPENING, "knows no thinking; set 'off'"),
        ("max", OPENING, "knows no thinking; set 'off'"),
        ("max", COMMENT, "knows no thinking; set 'off'"),
    ],
)
def test_what_it_cannot_is_refused(wanted, template, said):
    with pytest.raises(ValueError, match=said):
        variables(wanted, template)


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
