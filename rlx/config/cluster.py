"""The machines that a run is planned for: `rlx diff` sets them side by side, a program on one machine refuses them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    trainer_nodes: int
    inference_nodes: int
    gpus_per_node: int
    trainer_layout: str  # "TP4 PP3 CP2 DP1 EP8", "" = one device
    engines: int  # 0 = not planned: what inference.count or engine.kind say
    engine_layout: str  # of one engine, "TP16 EP16 DP2", "" = one GPU

    @property
    def planned(self) -> bool:
        """Whether it is for more than this machine."""
        return bool(self.trainer_nodes + self.inference_nodes > 1 or self.trainer_layout or self.engines)
