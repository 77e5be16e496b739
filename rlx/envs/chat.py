"""Questions to token ids and back, through the chat template of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Int32
from jinja2 import TemplateError

from rlx.config.chat import ChatConfig
from rlx.envs.thinking import EMPTY_THOUGHT, ends_in, thinking_variables
from rlx.envs.tool_calls import as_characters
from rlx.envs.vocabulary import read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "rlx probe"  # a response whose end is looked for in a rendered conversation
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
# Every turn as it was said, with an empty thought at the head of a response where thinking is off.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and enable_thinking is defined and not enable_thinking %}"
    + EMPTY_THOUGHT
    + "{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}" + EMPTY_THOUGHT + "{% endif %}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class ChatTokenizer:
    """The tokenizer of a checkpoint with what is said around every question.

    A prompt is `system_prompt`, then question + `suffix` (verbatim: give it its own space or newline) as the user's
    turn, then the opening of the assistant's. With system_prompt "" no system message is given; what the template
    does then is the model's own habit (SmolLM2's adds a default one).
    """

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]  # any of them ends a response: end of turn, end of text
    end_of_turn_id: int  # what the template writes after an assistant's turn
    system_prompt: str
    suffix: str
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the template: how much to think

    @property
    def vocab_size(self) -> int:
        """Ids are below it. A model's embedding may have more rows, as padding."""
        return len(self.tokenizer)

    def encode_prompt(self, question: str) -> Int32[np.ndarray, " prompt"]:
        """Token ids up to where the response begins."""
        return self.encode(self.render_prompt(question))

    def render_prompt(self, question: str) -> str:
        """The prompt as text, special tokens written out."""
        return self.render(self.messages(question))

    def render(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """A conversation up to where the next response begins, as text."""
        return _render(self.tokenizer, messages, add_generation_prompt=True, tools=tools, **self.variables)

    def encode_example(
        self, question: str, response: str
    ) -> tuple[Int32[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
        """(ids, mask) of a supervised example: the prompt, then the response and its end of turn with mask True.

        The response is encoded by itself after the prompt's ids, as it is when a policy generates it.
        """
        prompt, written = self.encode_prompt(question), self.encode(response)
        ids = np.concatenate([prompt, written, np.array([self.end_of_turn_id], np.int32)])
        return ids, np.arange(ids.size) >= prompt.size

    def decode(self, ids: Int32[np.ndarray, " tokens"]) -> str:
        """Text for people and graders, without special tokens."""
        text = self.tokenizer.decode(
            np.asarray(ids).tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)  # one sequence, one text
        return text

    def messages(self, question: str, more: str = "") -> list[dict[str, str]]:
        """The system message, with `more` behind it, and the question."""
        said = "\n\n".join(text for text in (self.system_prompt, more) if text)
        system = [{"role": "system", "content": said}] if said else []
        return [*system, {"role": "user", "content": question + self.suffix}]

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Ids of a text in which special tokens are written out; half a surrogate pair is a "?"."""
        return np.array(self.tokenizer.encode(as_characters(text), add_special_tokens=False), np.int32)

    def written_out(self, ids: Int32[np.ndarray, " tokens"]) -> str:
        """Text with special tokens as their names."""
        text = self.tokenizer.decode(
            np.asarray(ids).tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def name_of(self, token: int) -> str:
        """A token as text."""
        return self.written_out(np.array([token], np.int32))

    def knows(self, variable: str) -> bool:
        """Whether the template reads a variable."""
        return mentions(self.tokenizer.get_chat_template(), variable)

    @property
    def special_tokens(self) -> list[str]:
        """Names of the tokens that are no text, such as <|im_end|>."""
        return [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]

    def as_text(self, text: str) -> str:
        """A text that is told and can end no turn: names of special tokens in it are written apart."""
        for name in self.special_tokens:
            text = text.replace(name, f"{name[0]} {name[1:]}")
        return text

    def after(
        self, response: Int32[np.ndarray, " written"], ids: Int32[np.ndarray, "next"]
    ) -> Int32[np.ndarray, " appended"]:
        """What is appended to a response: its end of turn where it lacks it, then `ids`."""
        if len(response) and response[-1] == self.end_of_turn_id:
            return ids
        return np.concatenate([np.array([self.end_of_turn_id], np.int32), ids])

    @property
    def thinks(self) -> bool:
        """Whether a response may begin with thoughts."""
        return "<think>" in self.tokenizer.get_vocab() and not ends_in(self.render_prompt(_PROBE), "</think>")

    @property
    def begins_thoughts(self) -> bool:
        """Whether a prompt ends in <think>: a response is thought until it writes </think>."""
        return self.thinks and ends_in(self.render_prompt(_PROBE), "<think>")


def load_chat_tokenizer(path: str, system_prompt: str, suffix: str, chat: ChatConfig | None = None) -> ChatTokenizer:
    """The tokenizer in a Hugging Face directory; nothing is downloaded. chat: None asks the template for nothing.

    Raises:
        ValueError: there is no tokenizer or no chat template, the template refuses the system prompt or cannot do
            what `chat` asks for, or no token ends a response.
    """
    directory = pathlib.Path(path)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        raise ValueError(f"there is no tokenizer in {path!r}: a Hugging Face directory with tokenizer.json is needed")
    tokenizer = read_tokenizer(path)
    if chat is not None and chat.template == "chatml":
        _use_chatml(tokenizer, path)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer in {path!r} has no chat template, as base models often have none: take the instruct "
            "version's, or put a chat_template.jinja beside tokenizer.json"
        )
    _check_renders(tokenizer, path, system_prompt)
    end_of_turn = _end_of_turn_id(tokenizer, path)
    stop = {end_of_turn, *_configured_stop_ids(directory)} | ({tokenizer.eos_token_id} - {None})
    variables = {} if chat is None else _thinking(tokenizer, path, chat)
    return ChatTokenizer(tokenizer, tuple(sorted(stop)), end_of_turn, system_prompt, suffix, variables)


def mentions(template: str, variable: str) -> bool:
    return re.search(rf"\b{variable}\b", template) is not None


def _use_chatml(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    missing = [name for name in CHATML_TOKENS if name not in tokenizer.get_vocab()]
    if missing:
        raise ValueError(
            f"chat.template = 'chatml' writes {missing[0]}, which the tokenizer in {path!r} does not have as one "
            "token; set it to 'checkpoint'"
        )
    tokenizer.chat_template = CHATML


def _thinking(tokenizer: PreTrainedTokenizerBase, path: str, chat: ChatConfig) -> Mapping[str, Any]:
    def prompt(variables: Mapping[str, Any]) -> str:
        return _render(tokenizer, [{"role": "user", "content": "question"}], add_generation_prompt=True, **variables)

    try:
        return thinking_variables(chat.thinking, prompt, has_token="<think>" in tokenizer.get_vocab())
    except ValueError as error:
        raise ValueError(f"chat.thinking = {chat.thinking!r}: the chat template for {path!r} {error}") from error


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=None if tools is None else [dict(tool) for tool in tools],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    assert isinstance(text, str)
    return text


def _check_renders(tokenizer: PreTrainedTokenizerBase, path: str, system_prompt: str) -> None:
    user = [{"role": "user", "content": "question"}]
    try:
        _render(tokenizer, user, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(f"the chat template in {path!r} cannot render a question: {error}") from error
    try:
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        _render(tokenizer, system + user, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(
            f"the chat template in {path!r} refuses a system message ({error}): set tasks.system_prompt to '' and "
            "say it in tasks.suffix"
        ) from error


def _end_of_turn_id(tokenizer: PreTrainedTokenizerBase, path: str) -> int:
    """The special token that the template writes after an assistant's words; end of text where it writes none."""
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _PROBE}]
    after = _render(tokenizer, turns, add_generation_prompt=False).rpartition(_PROBE)[2].lstrip()
    ids = tokenizer.encode(after, add_special_tokens=False)[:1]
    if ids and ids[0] in tokenizer.added_tokens_decoder:
        return ids[0]
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"nothing ends a response: the tokenizer in {path!r} has no eos_token and its chat template writes no "
            "special token after an assistant's turn; set eos_token in tokenizer_config.json"
        )
    return tokenizer.eos_token_id


def _configured_stop_ids(directory: pathlib.Path) -> list[int]:
    file = directory / "generation_config.json"
    configured: Any = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    return configured if isinstance(configured, list) else [] if configured is None else [configured]
