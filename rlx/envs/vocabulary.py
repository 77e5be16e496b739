"""The tokenizer of a checkpoint, and its vocabulary: what its ids mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_tokenizer(directory: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer in a Hugging Face directory; nothing is downloaded."""
    # Without torch, transformers says at import that models are not available; only its tokenizers are used here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Imported here: it takes a second, in which programs compile.
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    return tokenizer


def read_vocabulary(directory: Path | str) -> dict[str, int]:
    """Token -> id of the tokenizer in a Hugging Face directory, added tokens included; nothing is downloaded.

    Raises ValueError where there is none.
    """
    if not any((Path(directory) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(f"there is no tokenizer in {directory}: its ids could not be compared")
    return read_tokenizer(directory).get_vocab()
