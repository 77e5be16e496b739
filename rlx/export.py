"""A trained policy as files that other programs read."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlx import assemble
from rlx.config.schema import Config
from rlx.learner.state import LearnerState
from rlx.models import hf, peft


def write_policy(config: Config, model: assemble.Model, state: LearnerState, directory: Path) -> Path:
    """A PEFT adapter where LoRA was trained, else a Hugging Face checkpoint; replaces what an earlier call wrote."""
    kind = "adapter" if config.lora.rank else "model"
    path = directory / kind
    shutil.rmtree(path, ignore_errors=True)
    if config.lora.rank:
        peft.save_adapter(path, model.arch, state.trainable, config.lora, config.model.path)
    else:
        write_merged(config, model, state, path)
    return path


def write_merged(config: Config, model: assemble.Model, state: LearnerState, path: Path) -> None:
    """The whole model in one Hugging Face directory, adapter merged in. `path` must not exist."""
    params = assemble.policy_params(config, model, state.trainable)
    hf.save_params(path, model.arch, params, config.model.dtype, tokenizer_from=config.model.path)
