"""What frozen policies add to an update: their weights, the arrays that they give a batch, a forward pass of each.

Roles of equal weights are one policy, as in `rlx.distillation.policies`; here they are told apart by their directories.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

from rlx.metrics.jsonl import read_json
from rlx.models.description import Architecture
from rlx.models.hf_config import read_config
from rlx.models.spec import param_specs
from rlx.parallel.layout import Layout
from rlx.planning.case import Case, numbers_here
from rlx.proxy.signal import FILE, Part, read_signal

ADAPTER = "adapter_config.json"


class Policy(NamedTuple):
    """Of one that scores. adapter: "" = the model alone; known = False: it is not there yet, and counted as the trained
    model."""

    path: str
    adapter: str
    arch: Architecture
    known: bool


def policies(case: Case) -> tuple[Policy, ...]:
    """The different policies that score every trained token.

    Raises:
      SignalError: a signal that is damaged. ValueError: a model that cannot be read.
    """
    config = case.config
    distill, found = config.objective.distill, list[Policy]()
    if config.objective.needs_reference:
        found.append(Policy(config.model.path, "", case.arch, True))
    if distill.form != "off" and distill.signal == "teacher":
        found += [_policy(path, "", case.arch) for path in config.frozen.teachers]
    elif distill.form != "off":
        for directory in config.frozen.signals:
            found += [_policy(part.path, part.adapter, case.arch) for part in _parts(directory)]
    return tuple(dict.fromkeys(found))


def _parts(directory: str) -> tuple[Part, Part]:
    """Expert and base. One that is yet to be made has two models."""
    if (Path(directory) / FILE).is_file():
        signal = read_signal(directory)
        return signal.expert, signal.base
    absent = [Part(f"{directory}: {role}", "", "", "", 0, 0) for role in ("expert", "base")]
    return absent[0], absent[1]


def _policy(path: str, adapter: str, trained: Architecture) -> Policy:
    if (Path(path) / ADAPTER).is_file():
        path, adapter = str(read_json(Path(path) / ADAPTER)["base_model_name_or_path"]), path
    known = (Path(path) / "config.json").is_file()
    return Policy(path, adapter, read_config(path) if known else trained, known)


def weight_bytes(case: Case) -> int:
    """On one device. With LoRA the reference is the base, which is there already; adapters are next to nothing."""
    models = {policy.path: policy.arch for policy in policies(case)}
    if case.config.lora.rank:
        models.pop(case.config.model.path, None)
    return sum(case.itemsize * _numbers(arch, case.layout) for arch in models.values())


# A search asks for the same layout with many batches.
@functools.lru_cache(maxsize=512)
def _numbers(arch: Architecture, layout: Layout) -> int:
    return numbers_here(param_specs(arch), arch, layout)


def arrays(case: Case) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, sizes) of what `rlx.distillation.frozen` gives a micro-batch, by name, where all have one vocabulary."""
    distill, reference = case.config.objective.distill, case.config.objective.needs_reference
    names = ["reference_logprobs"] if reference else []
    wide: list[str] = []
    if distill.form != "off":
        names += ["signal"]
        names += ["teacher_logprobs"] if distill.filter == "agreeing" else []
        names += ["overlap"] if distill.calibration == "overlap" else []
    if distill.form in ("top_k", "full"):
        wide = ["head_signal", *(["head_reference_logprobs"] if reference else [])]
    width = case.config.rollout.head_size if distill.form == "top_k" else case.arch.vocab_size
    of_targets = (case.rows, case.targets)
    return dict.fromkeys(names, ("float32", of_targets)) | dict.fromkeys(wide, ("float32", (*of_targets, width)))


def said(case: Case) -> list[str]:
    """For people: who scores, and what was assumed of whom."""
    found = policies(case)
    if not found:
        return []
    lines = [f"frozen policies that score each trained token: {len(found)}"]
    lines += [f"  {p.path} is not there yet: counted as the trained model" for p in found if not p.known]
    return lines
