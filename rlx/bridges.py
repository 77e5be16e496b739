"""How a run's weights come to its servers, from the configuration; and whether they did."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlx import assemble
from rlx.audit import texts_of
from rlx.audit_engine import WORST, Reference, audit_engine, audit_start, check
from rlx.config.errors import ConfigError
from rlx.config.schema import Config
from rlx.metrics.attribution import TOLERANCE
from rlx.models.hf_names import hf_tensors
from rlx.models.spec import Params
from rlx.probing import Policy, logprobs
from rlx.rollout.engine import EngineError
from rlx.rollout.fleet import Fleet
from rlx.rollout.sglang import SglangEngine
from rlx.sync.bridge import Bridge, Link
from rlx.sync.disk import Disk
from rlx.sync.distributed import Distributed, GroupOptions
from rlx.sync.lora import AdapterBridge, AdapterLink, Probe, Send
from rlx.sync.naming import served_layout_unsupported_reason
from rlx.sync.staging import Staged, Staging
from rlx.sync.tensor import Tensor


def publishes_adapter(config: Config) -> bool:
    """Do the engines get the adapter by itself?"""
    return config.engine.kind == "sglang" and config.inference.weights == "adapter"


def check_adapters(config: Config, model: assemble.Model) -> None:
    """Raises ConfigError where engines are to get the adapter of a model of whose adapters they are not known to make
    what the trainer does."""
    reason = served_layout_unsupported_reason(hf_tensors(model.arch))
    if publishes_adapter(config) and reason is not None:
        raise ConfigError(
            f"config.inference.weights = 'adapter': the model in {config.model.path} ({model.arch.model_type}) is none "
            f"of the dense Qwen2 and Qwen3 models whose adapters are published by themselves: {reason}; set 'full', "
            "which sends the weights with the adapter merged in"
        )


def published(
    config: Config, model: assemble.Model, trainable: Params, version: int, staging: Staging | None
) -> Params | Staged | None:
    """What is published of a learner's state: the adapter, or all parameters with it merged in.

    Where several processes hold the parameters they are staged here, tensor by tensor, and no process has them whole;
    all of them call this, and the first one gets what it wrote. Raises what `Staging.stage` does.
    """
    if publishes_adapter(config):
        return model.gather(trainable)
    policy = assemble.policy_params(config, model, trainable)
    if staging is None or jax.process_count() == 1:
        return model.gather(policy)
    return staging.stage(policy, version)


def _place(config: Config, directory: Path) -> Path:
    shared = config.inference.weights_directory
    return Path(shared) / config.run.name if shared else directory / "weights"


def make_staging(config: Config, model: assemble.Model, directory: Path) -> Staging | None:
    """Where versions of all parameters become files for servers; None where none do. directory: of the run.

    Raises OSError where they cannot be written.
    """
    if config.engine.kind == "local" or publishes_adapter(config):
        return None
    return Staging(
        _place(config, directory),
        model.arch,
        config.model.dtype,
        bucket_bytes=config.inference.bucket_mib << 20,
        durable=config.inference.transport == "disk",
        for_cpu=config.inference.device == "cpu",
    )


def make_bridge(
    config: Config, model: assemble.Model, directory: Path, staging: Staging | None
) -> Bridge | AdapterBridge:
    """staging: of `make_staging`; None: adapters are published. Raises OSError where those cannot be written.

    The probe of an adapter is computed by one process, so there is none where a trainer has several: a warning says so.
    """
    inference = config.inference
    if staging is None:
        if jax.process_count() > 1:
            warnings.warn(
                f"adapters are not checked after publications: one of {jax.process_count()} processes cannot compute "
                "what servers should say of a text",
                stacklevel=2,
            )
        send: Send = "disk" if inference.transport == "disk" else "tensor"
        return AdapterBridge(
            _place(config, directory),
            model.arch,
            config.lora,
            config.model.path,
            send,
            probe=_probe(config, model) if jax.process_count() == 1 else None,
            ranks=inference.tensor_parallel,
            timeout_s=config.producer.load_timeout_s,
        )
    return Bridge(staging, partial(_transport, config))


def _transport(config: Config) -> Disk | Tensor | Distributed:
    inference, limit = config.inference, config.producer.load_timeout_s
    if inference.transport == "disk":
        return Disk(limit)
    if inference.transport == "tensor":
        return Tensor(inference.tensor_parallel, limit)
    options = GroupOptions(
        python=inference.python,
        backend=inference.distributed_backend,
        ranks=inference.tensor_parallel,
        timeout_s=limit,
    )
    return Distributed(options)


# ---------------------------------------------------------------------------------------------------------------- audit


def audit_texts(config: Config) -> list[np.ndarray]:
    return texts_of(None, Path(config.model.path), config.engine.context)


def _probe(config: Config, model: assemble.Model) -> Probe:
    texts = audit_texts(config)

    def expected(adapter: Params) -> list[np.ndarray]:
        policy = Policy("adapter", model.arch, assemble.policy_params(config, model, adapter))
        return [logprobs(policy, text) for text in texts]

    return Probe(tuple(texts), expected, model.arch.vocab_size, WORST * TOLERANCE[config.model.dtype])


async def audit(
    config: Config,
    model: assemble.Model,
    fleet: Fleet,
    engines: Sequence[SglangEngine],
    trainable: Params,
    version: int,
) -> None:
    """Raises AuditFailed where an engine does not serve this state as `version`, or rather serves the base model.

    One that cannot be asked is ejected, as everywhere else.
    """
    reference = await asyncio.to_thread(_reference, config, model, trainable, version)
    for engine in engines:
        # Behind a router the one member stands for all of them.
        member = next((m for m in fleet.members if m.engine.name == engine.name), fleet.members[0])
        loads = len(member.versions)
        try:
            found = await audit_engine(engine, reference, adapter=publishes_adapter(config))
        except EngineError as error:
            fleet.eject(member, "audit", str(error))
            continue
        # One that was started again meanwhile has yet to be given the weights.
        if member.in_service and len(member.versions) == loads:
            check(found)


def _reference(config: Config, model: assemble.Model, trainable: Params, version: int) -> Reference:
    policy = assemble.policy_params(config, model, trainable)
    known = Policy("published", model.arch, policy, version)
    # A run that trains every parameter keeps none beside them.
    params = model.params or assemble.load_params(config, model.arch, model.placement)
    return Reference(known, Policy("base", model.arch, params, 0), audit_texts(config))


async def audit_transport(
    engines: Sequence[SglangEngine], links: Sequence[Link | AdapterLink], weights: Any, version: int
) -> None:
    """Does every tensor arrive? Raises AuditFailed; an idle engine's weights are overwritten and loaded again."""
    for engine, link in zip(engines, links, strict=True):
        assert isinstance(link, Link)  # the configuration refuses this audit for adapters

        async def load(engine: SglangEngine = engine, link: Link = link) -> None:
            link.served = None  # else only what has changed since would be sent
            await engine.load(weights, version)

        await audit_start(engine, load)
