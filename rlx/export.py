"""A trained policy as files that other programs read.

    rlx export --config=configs/quickstart.py --to=models/trained
writes the newest checkpoint of that run as one Hugging Face directory, the adapter merged in.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from rlx import assemble, cli
from rlx.checkpoint import CheckpointError, Checkpoints, Restored
from rlx.config.flags import config_or_exit
from rlx.config.identity import POLICY, check_same
from rlx.config.schema import Config
from rlx.learner.state import LearnerState
from rlx.metrics.jsonl import read_json
from rlx.models import hf, peft
from rlx.models.description import Params
from rlx.types import Task


def write_policy(config: Config, model: assemble.Model, state: LearnerState, directory: Path) -> Path:
    """A PEFT adapter where LoRA was trained, else a Hugging Face checkpoint; replaces what an earlier call wrote."""
    kind = "adapter" if config.lora.rank else "model"
    path = directory / kind
    if path.exists():
        shutil.rmtree(path)
    if config.lora.rank:
        peft.save_adapter(path, model.arch, policy_of(config, model, state), config.lora, config.model.path)
    else:
        write_merged(config, model, state, path)
    return path


def policy_of(config: Config, model: assemble.Model, state: LearnerState) -> Params:
    """What `write_policy` writes."""
    if config.lora.rank:
        return model.gather(state.trainable)
    return model.gather(assemble.policy_params(config, model, state.trainable))


def write_merged(config: Config, model: assemble.Model, state: LearnerState, path: Path) -> None:
    """The whole model in one Hugging Face directory, adapter merged in. `path` must not exist."""
    params = model.gather(assemble.policy_params(config, model, state.trainable))
    hf.save_params(path, model.arch, params, config.model.dtype, tokenizer_from=config.model.path)


def check_run(config: Config) -> None:
    """Raises ConfigError where the run that `config` names was made with another model, adapter or tasks."""
    written = config.run.path / "config.json"
    if written.is_file():
        check_same(read_json(written), config, POLICY, str(config.run.path))


def newest(config: Config, model: assemble.Model, held_out: Sequence[Task] | None = None) -> Restored | None:
    """The newest checkpoint of the run that `config` names, None where it has none. Changes nothing on the disk.

    Raises ConfigError where it is of another model or, where they are given, of other held-out tasks.
    """
    directory = config.run.path / "checkpoints"
    if not directory.is_dir():
        return None
    for attempt in range(3):  # the run may be training: what was the newest step may be removed while it is read
        checkpoints = Checkpoints(directory, keep=None)
        step = checkpoints.latest_step
        try:
            if step is None:
                return None
            restored = checkpoints.restore(assemble.fresh_state(config, model), step)
            break
        except CheckpointError:
            if attempt == 2 or (directory / str(step)).exists():
                raise
        finally:
            checkpoints.close()
    assemble.check_belongs(config, model, held_out, restored.host, str(config.run.path))
    return restored


def main(argv: list[str] | None = None) -> int:
    """`rlx export`: 0 when written, 1 where the run has no checkpoint, 2 for a wrong configuration or target."""
    argv = sys.argv if argv is None else argv
    own = flags.FlagValues()
    target = flags.DEFINE_string("to", "", "the directory to make", flag_values=own)
    config = config_or_exit(argv, own, __doc__ or "")
    if not target.value or Path(target.value).exists():
        print(f"rlx export: --to={target.value!r} must name a directory that does not exist yet", file=sys.stderr)
        return 2
    check_run(config)
    model = assemble.load_model(config)
    restored = newest(config, model)
    if restored is None:
        print(
            f"rlx export: {config.run.path} has no checkpoint; train first, or give --config.run.name", file=sys.stderr
        )
        return 1
    write_merged(config, model, restored.state, Path(target.value))
    print(f"version {int(restored.state.version)} of {config.run.name} is in {target.value}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("export", sys.argv[1:]))
