"""A trained policy as files that other programs read.

    rlx export --config=configs/quickstart.py --to=models/trained
writes the newest checkpoint of that run as one Hugging Face directory, the adapter merged in.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import jax
from absl import flags

from rlx import assemble
from rlx.checkpoint import CheckpointError, Checkpoints
from rlx.config.flags import config_or_exit
from rlx.config.schema import Config
from rlx.learner.state import LearnerState, init_state, make_optimizer
from rlx.models import hf, peft


def write_policy(config: Config, model: assemble.Model, state: LearnerState, directory: Path) -> Path:
    """A PEFT adapter where LoRA was trained, else a Hugging Face checkpoint; replaces what an earlier call wrote."""
    kind = "adapter" if config.lora.rank else "model"
    path = directory / kind
    if path.exists():
        shutil.rmtree(path)
    if config.lora.rank:
        peft.save_adapter(path, model.arch, state.trainable, config.lora, config.model.path)
    else:
        write_merged(config, model, state, path)
    return path


def write_merged(config: Config, model: assemble.Model, state: LearnerState, path: Path) -> None:
    """The whole model in one Hugging Face directory, adapter merged in. `path` must not exist."""
    params = assemble.policy_params(config, model, state.trainable)
    hf.save_params(path, model.arch, params, config.model.dtype, tokenizer_from=config.model.path)


def main(argv: list[str] | None = None) -> int:
    """`rlx export`: 0 when written, 1 where the run has no checkpoint, 2 for a wrong configuration or target."""
    argv = sys.argv if argv is None else argv
    own = flags.FlagValues()
    target = flags.DEFINE_string("to", "", "the directory to make", flag_values=own)
    config = config_or_exit(argv, own, __doc__ or "")
    if not target.value or Path(target.value).exists():
        print(f"rlx export: --to={target.value!r} must name a directory that does not exist yet", file=sys.stderr)
        return 2
    source = Path(config.run.directory) / config.run.name / "checkpoints"
    if not source.is_dir():
        print(f"rlx export: {source} does not exist; train first, or give --config.run.name", file=sys.stderr)
        return 1
    model = assemble.load_model(config)
    fresh = init_state(
        model.arch, config.lora, model.params, make_optimizer(config.learner), jax.random.key(config.run.seed)
    )
    checkpoints = Checkpoints(source, keep=None)
    try:
        restored = checkpoints.restore(fresh)
    except CheckpointError as error:
        print(f"rlx export: {error}", file=sys.stderr)
        return 1
    finally:
        checkpoints.close()
    write_merged(config, model, restored.state, Path(target.value))
    print(f"version {int(restored.state.version)} of {config.run.name} is in {target.value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
