"""A plan for people: tables of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlx.config.schema import Config
from rlx.planning.case import Case
from rlx.planning.costs import Costs
from rlx.planning.counts import Counts
from rlx.planning.engine import Cache
from rlx.planning.estimate import Memory
from rlx.planning.hardware import GB, USABLE, Device
from rlx.planning.search import Change

KINDS = {
    "weights": "weights of the model",
    "adapter": "adapter",
    "gradients": "gradients: the sum, and one micro-batch's",
    "optimizer": "optimizer: two moments",
    "frozen": "frozen policies: reference, teachers, signals",
    "activations": "activations: kept, and of the layer at work",
    "kv_and_state": "keys, values and states of the engine",
    "logits": "logits of one chunk, hidden states of targets",
    "buffers": "buffers: batch, exchange, gathered and merged weights",
}


def parameters(counts: Counts, case: Case) -> list[str]:
    arch, lora = case.arch, case.config.lora
    total, active = (short(n) for n in (counts.total_parameters, counts.active_parameters))
    how = f"LoRA of rank {lora.rank}, routed experts {lora.experts}" if lora.rank else "every parameter"
    return [
        f"{case.config.model.path}: {arch.model_type}, {arch.num_layers} layers, {total} parameters, {active} of them "
        "active for a token, the output head left out",
        f"trainable: {short(counts.trainable_parameters)}, {counts.trainable_share:.2%} of it ({how})",
        *_rows((name, short(n)) for name, n in sorted(counts.adapted.items())),
    ]


def memory_table(memory: Memory, device: Device, case: Case) -> list[str]:
    named = [(KINDS[kind], _gb(size)) for kind, size in memory._asdict().items() if size]
    shape = f"{case.rows} x {case.tokens} tokens a micro-batch, remat {case.remat}"
    return [
        "",
        f"memory of one of {case.layout.devices} {device.name}, {case.layout}, {shape}",
        *_rows([*named, ("in all", _gb(memory.total)), (f"usable ({USABLE:.0%})", _gb(device.usable))]),
    ]


def fit(fits: bool, found: Sequence[Change], memory: Memory, device: Device) -> list[str]:
    if fits:
        return [f"it fits, with {_gb(device.usable - memory.total)} to spare"]
    most = max(memory._asdict().items(), key=lambda item: item[1])
    said = [f"IT DOES NOT FIT: {_gb(memory.total - device.usable)} too much, most of it {KINDS[most[0]]}. What would:"]
    return said + ([f"  {_gb(change.bytes):>10}  {change.said}" for change in found] or ["  nothing that was tried"])


def cost_table(costs: Costs, device: Device, case: Case) -> list[str]:
    config, devices = case.config, case.layout.devices
    sent = [(f"sent over {name} ({costs.links[name]}), a device", _gb(size)) for name, size in costs.sent.items()]
    mfu = costs.mfu(device, devices, config.model.dtype)
    return [
        "",
        f"an update of {costs.tokens:,.0f} tokens in {costs.micro_batches} micro-batches, products at "
        f"{config.plan.efficiency:.0%} of the peak",
        *_rows(
            [("FLOPs, what is recomputed included", f"{costs.flops:.3g}"), *sent, ("bubble", f"{costs.bubble:.1%}")]
        ),
        *_rows([*((name, f"{s:.3g} s") for name, s in costs.seconds.items() if s)]),
        *_rows([("an update", f"{costs.update_seconds:.3g} s"), ("MFU", f"{mfu:.1%}")]),
    ]


def engines(cache: Cache, config: Config) -> list[str]:
    each = cache.sequence + cache.token * config.engine.context
    states = f" and {cache.sequence / 1000:,.1f} kB a sequence" if cache.sequence else ""
    return [
        "",
        f"engines hold {cache.token / 1000:,.1f} kB a token{states}: {_gb(each)} for one of "
        f"{config.engine.context:,} tokens",
    ]


def short(count: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return str(count)


def _gb(size: float) -> str:
    return f"{size / GB:,.2f} GB" if size >= GB / 200 or not size else "< 0.01 GB"


def _rows(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}  {value:>10}" for name, value in rows]
