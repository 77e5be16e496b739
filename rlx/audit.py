"""Audits of what engines serve and of what a run's sampler wrote.

    rlx audit --engine URL --checkpoint DIR     does the engine serve these weights?
    rlx audit --samples FILE                    why do sampler and trainer disagree?

The first compares names, shapes and checksums of tensors, log-probs of given texts, and the distances to the checkpoint
and to the initial policy. Keys of a server are taken from RLX_API_KEY and RLX_ADMIN_API_KEY. The second recomputes the
log-probs of a samples.jsonl under one supposed cause after the other and names the one that fits. Weights are those
of the run that the file lies in, or of --checkpoint.

Status: 0 = nothing is wrong, 1 = something is, 2 = it cannot be told.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from rlx import assemble, cli
from rlx.audit_engine import EngineAudit, Reference, audit_engine
from rlx.audit_samples import audit_samples, read_drawn
from rlx.checkpoint import Checkpoints
from rlx.config.errors import ConfigError
from rlx.config.parse import parse_recorded
from rlx.config.schema import Config
from rlx.envs.chat import ChatTokenizer, load_chat_tokenizer
from rlx.metrics.attribution import Attribution
from rlx.models import hf, peft
from rlx.models.files import read_json
from rlx.models.lora import adapter_scale, merge
from rlx.probing import Policy
from rlx.rollout.engine import EngineError
from rlx.rollout.sglang import SglangEngine, SglangOptions
from rlx.rollout.sglang_http import Server
from rlx.rollout.sglang_requests import Limits

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "What is 17 times 23? First 17 times 20 is 340, then 17 times 3 is 51, so the answer is 391.",
    "def add(a, b):\n    return a + b\n",
    "Der Zug fährt um halb neun ab. 次の駅で降ります。",
)


# ------------------------------------------------------------------------------------------------------------- weights


def load_policy(directory: Path, dtype: str, version: int | None, base: Path | None = None) -> Policy:
    """A Hugging Face directory, or a PEFT adapter merged into its base model.

    base: where the adapter's own base_model_name_or_path is not to be believed.
    Raises OSError or ValueError for what is missing or does not fit.
    """
    if not (directory / peft.CONFIG_FILE).is_file():
        arch = hf.read_architecture(directory)
        return Policy(str(directory), arch, _on_device(hf.load_params(directory, arch, dtype)), version)
    found = base or base_of(directory)
    arch = hf.read_architecture(found)
    params = _on_device(hf.load_params(found, arch, dtype))
    adapter, lora = peft.load_adapter(directory, arch)
    return Policy(str(directory), arch, merge(params, _on_device(adapter), adapter_scale(lora)), version)


def base_of(directory: Path) -> Path:
    """The base model of a PEFT adapter."""
    named = read_json(directory / peft.CONFIG_FILE).get("base_model_name_or_path")
    if not named or not Path(named).is_dir():
        raise ValueError(f"{directory / peft.CONFIG_FILE} names {named!r} as base model, which is no directory here")
    return Path(named)


def initial_of(directory: Path, dtype: str) -> Policy | None:
    """What an adapter began from: its base model. A whole checkpoint does not say."""
    if not (directory / peft.CONFIG_FILE).is_file():
        return None
    return dataclasses.replace(load_policy(base_of(directory), dtype, 0), name="the initial policy")


def run_policies(config: Config) -> Iterator[Policy]:
    """The versions of a run that are still known: its checkpoints', newest first, and the one that it began with.

    A run with a supervised cold start began with weights that no checkpoint holds: its version 0 is left out.
    """
    model = assemble.load_model(config)
    fresh = assemble.fresh_state(config, model)
    if (config.run.path / "checkpoints").is_dir():
        checkpoints = Checkpoints(config.run.path / "checkpoints", keep=None)
        for step in reversed(checkpoints.steps):
            state = checkpoints.restore(fresh, step).state
            params = assemble.policy_params(config, model, state.trainable)
            yield Policy(f"checkpoint {step}", model.arch, params, int(state.version))
        checkpoints.close()
    if not config.sft.steps:
        params = assemble.policy_params(config, model, fresh.trainable)
        yield Policy("the initial policy", model.arch, params, 0)


def _on_device(params: Any) -> Any:
    return jax.tree.map(jnp.asarray, params)


# ------------------------------------------------------------------------------------------------------------- engines


def texts_of(file: Path | None, directory: Path, longest: int) -> list[np.ndarray]:
    """Token ids of the file's lines, or of a few built-in ones."""
    lines = TEXTS if file is None else [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    file_of_ids = _model_of(directory) / "tokenizer.json"
    if not file_of_ids.is_file():
        raise ValueError(f"{file_of_ids} does not exist: texts are encoded with it; put the model's there")
    tokenizer = Tokenizer.from_file(str(file_of_ids))
    encoded = [np.array(tokenizer.encode(line, add_special_tokens=False).ids, np.int32)[:longest] for line in lines]
    enough = [ids for ids in encoded if len(ids) > 1]
    if not enough:
        raise ValueError("no text has two tokens")
    return enough


async def ask_engine(arguments: argparse.Namespace) -> EngineAudit:
    directory: Path = arguments.checkpoint
    published = load_policy(directory, arguments.dtype, arguments.version)
    initial = (
        dataclasses.replace(load_policy(arguments.initial, arguments.dtype, 0), name="the initial policy")
        if arguments.initial
        else initial_of(directory, arguments.dtype)
    )
    server = Server(arguments.engine, os.environ.get("RLX_API_KEY", ""), os.environ.get("RLX_ADMIN_API_KEY", ""))
    limits = Limits(published.arch.vocab_size, published.arch.max_positions)
    engine = SglangEngine(server, SglangOptions(limits, parse_processes=0), _nothing, adapter=arguments.adapter)
    try:
        texts = texts_of(arguments.texts, directory, min((await engine.served()).input_limit - 1, limits.context))
        reference = Reference(published, initial, texts)
        return await audit_engine(engine, reference, adapter=arguments.adapter is not None)
    finally:
        await engine.close()


async def _nothing(*_: Any) -> None:
    raise EngineError("an audit publishes nothing")


# ------------------------------------------------------------------------------------------------------------- samples


def ask_samples(arguments: argparse.Namespace) -> Attribution:
    """Raises ValueError or OSError where the weights that wrote the samples are not known."""
    file: Path = arguments.samples
    samples = list(read_drawn(file))
    run: Path = (arguments.run or file.parent).resolve()
    recorded = run / "config.json"
    config = parse_recorded(read_json(recorded), recorded) if recorded.is_file() else None
    if config is not None:
        # The run may have been moved since it was made.
        where = dataclasses.replace(config.run, directory=str(run.parent), name=run.name)
        config = dataclasses.replace(config, run=where)
    temperature = arguments.temperature or (config.rollout.temperature if config is not None else 1.0)
    dtype = arguments.dtype if config is None else config.model.dtype
    policies = []
    if arguments.checkpoint:
        policies.append(load_policy(arguments.checkpoint, dtype, arguments.version))
        first = initial_of(arguments.checkpoint, dtype)
        policies += [] if first is None else [first]
    elif config is not None:
        policies += run_policies(config)
    else:
        raise ValueError(
            f"there is no run in {run}: give the one that wrote the samples, --run DIR or --checkpoint DIR"
        )
    policies += [load_policy(path, dtype, -1 - i) for i, path in enumerate(arguments.stale)]
    tokenizer = _tokenizer(arguments.checkpoint, config)
    return audit_samples(samples, policies, temperature, tokenizer, arguments.tokens)


def _tokenizer(checkpoint: Path | None, config: Config | None) -> ChatTokenizer | None:
    """For prompts by other templates. A checkpoint without one has none to try."""
    if config is not None:
        return load_chat_tokenizer(config.model.path, config.tasks.system_prompt, config.tasks.suffix, config.chat)
    assert checkpoint is not None
    try:
        return load_chat_tokenizer(str(_model_of(checkpoint)), "", "")
    except ValueError as error:
        print(f"rlx audit: prompts as other templates make them are not tried: {error}", file=sys.stderr)
        return None


def _model_of(directory: Path) -> Path:
    """The directory itself, or an adapter's base model's."""
    return base_of(directory) if (directory / peft.CONFIG_FILE).is_file() else directory


# ------------------------------------------------------------------------------------------------------------- command


def describe_engine(audit: EngineAudit) -> str:
    compared = audit.not_compared or f"{audit.tensors} tensors compared by checksum"
    lines = [f"engine {audit.engine}, weights {audit.label!r}", f"  tensors: {compared}"]
    lines.append(
        f"  log-probs of {audit.tokens} tokens: mean |gap| {audit.distance_published:.2e} to the checkpoint, "
        f"{audit.logprob_max:.2e} at worst"
    )
    if audit.distance_initial is not None:
        nearer = audit.nearer or "which the checkpoint cannot be told from"
        lines.append(f"  distance to the initial policy {audit.distance_initial:.2e}; nearer: {nearer}")
    return "\n".join([*lines, *(f"  WRONG: {problem}" for problem in audit.problems)])


def describe_samples(found: Attribution) -> str:
    ranked = sorted(found.outcomes, key=lambda o: math.inf if math.isnan(o.residual) else o.residual)
    table = [f"  {o.residual:9.2e}  {o.cause:<18}  {o.detail}" for o in ranked if not math.isnan(o.residual)]
    head = [f"cause: {found.cause}", found.evidence, "", f"  {found.gap_mean:9.2e}  as recorded, {found.tokens} tokens"]
    return "\n".join([*head, *table])


def plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="rlx audit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--engine", metavar="URL", help="a server: http://HOST:PORT")
    what.add_argument("--samples", type=Path, metavar="FILE", help="samples.jsonl of a run")
    parser.add_argument("--run", type=Path, metavar="DIR", help="the run that wrote the samples (default: around FILE)")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="a Hugging Face directory or a PEFT adapter")
    parser.add_argument("--version", type=int, help="which version the checkpoint is (default: not compared)")
    parser.add_argument("--initial", type=Path, metavar="DIR", help="version 0 (default: an adapter's base model)")
    parser.add_argument("--adapter", metavar="NAME", help="the LoRA adapter under which the engine serves it")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="texts to compare log-probs on, one a line")
    parser.add_argument(
        "--stale", type=Path, metavar="DIR", action="append", default=[], help="an older version to try"
    )
    parser.add_argument("--temperature", type=float, help="of the samples (default: the run's, or 1)")
    parser.add_argument("--tokens", type=int, default=2000, help="the most that are recomputed (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights in memory")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args(argv)
    if arguments.engine and not arguments.checkpoint:
        parser.error("--engine needs --checkpoint DIR: the weights that it should serve")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 = as it should be, 1 = something is wrong, 2 = it cannot be told."""
    arguments = arguments_of(argv)
    try:
        if arguments.engine:
            audit = asyncio.run(ask_engine(arguments))
            text, result, ok = describe_engine(audit), audit.to_dict(), audit.ok
        else:
            found = ask_samples(arguments)
            text, result, ok = describe_samples(found), found.to_dict(), found.ok
    except (OSError, ValueError, ConfigError, EngineError) as error:
        print(f"rlx audit: {error}", file=sys.stderr)
        return 2
    print(text)
    if arguments.json:
        print(json.dumps(plain(result), ensure_ascii=False))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(cli.run("audit", sys.argv[1:]))
