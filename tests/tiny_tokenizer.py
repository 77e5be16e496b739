"""A byte-level chat tokenizer of 260 ids, written as a Hugging Face directory: `build(tmp_path)`."""

from __future__ import annotations

import json
import pathlib

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
END_OF_TEXT, IM_START, IM_END, PAD = range(4)
VOCAB_SIZE = 256 + len(SPECIAL)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(
    directory: pathlib.Path | str,
    template: str | None = CHATML,
    eos_token: str | None = "<|endoftext|>",
    generation_eos: int | list[int] | None = None,
) -> str:
    """Write the tokenizer and return its directory. generation_eos: eos_token_id of generation_config.json."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {token: i for i, token in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token, "pad_token": "<|pad|>"}
    if template is not None:
        config["chat_template"] = template
    _write(directory / "tokenizer_config.json", {k: v for k, v in config.items() if v is not None})
    if generation_eos is not None:
        _write(directory / "generation_config.json", {"eos_token_id": generation_eos})
    return str(directory)


def _write(file: pathlib.Path, content: dict) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")
