"""The vocabulary of a tokenizer, without its chat template: what its ids mean."""

from __future__ import annotations

import os
from pathlib import Path

# Without torch, transformers says at import that models are not available; only its tokenizers are used here.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import AutoTokenizer


def read_vocabulary(directory: Path | str) -> dict[str, int]:
    """Token -> id of the tokenizer in a Hugging Face directory, added tokens included; nothing is downloaded.

    Raises ValueError where there is none.
    """
    if not any((Path(directory) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(f"there is no tokenizer in {directory}: its ids could not be compared")
    vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(str(directory), local_files_only=True).get_vocab()
    return vocabulary
