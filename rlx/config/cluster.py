"""The machines of a run: what its trainer runs on, and the engines that are planned beside it."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    trainer_nodes: int  # one process each
    inference_nodes: int
    gpus_per_node: int
    trainer_layout: str  # "TP4 PP3 CP2 DP1 EP8", "" = one device
    pipeline_rounds: int  # blocks of layers that each stage holds
    context_parallel: Literal["gather", "ring"]  # of a row's keys and values over CP
    sequence_parallel: bool  # tokens over TP too, between layers' products
    engines: int  # 0 = not planned: what inference.count or engine.kind say
    engine_layout: str  # of one engine, "TP16 EP16 DP2", "" = one GPU
