"""`rlx verify-layout`: does a layout compute what one device computes? Loss, gradients and one update are compared.

    rlx verify-layout --config=configs/tiny_moe.py --layout="TP2 DP2 CP2 EP4"
    rlx verify-layout --config=configs/tiny_dense.py --layout=TP4,PP3,CP2 --dtype=float32 --json
The devices are virtual ones of this CPU: nothing else is needed. config.model.path needs a config.json and no weights,
which are drawn. In float64 the loss must agree within 1e-9 of the mean loss of a token, every gradient within 1e-8 of
its norm and what one update changes within 1e-5; in float32 within 5 times what one device's float32 is from its own
float64, the largest of four roundings, and at least 1e-6.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
from absl import flags

from rlx import cli
from rlx.config.errors import ConfigError
from rlx.config.flags import config_or_exit
from rlx.layouts import Comparison, compare
from rlx.models.hf_config import read_config
from rlx.models.spec import count_parameters
from rlx.parallel.layout import LayoutError, parse_layout

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-9, 1e-8  # in float64
# Adam divides a gradient by its own size, so the smallest elements of a tensor differ by most of theirs.
UPDATE_TOLERANCE = 1e-5
FLOAT32_FACTOR, FLOAT32_FLOOR = 5.0, 1e-6
# Weights, gradients, optimizer state and their copies on one device and on all, 8 bytes each.
MOST_PARAMETERS = 200_000_000


def main(argv: list[str] | None = None) -> int:
    """0 where they agree, 1 where they do not, 2 for a wrong configuration or layout."""
    argv = sys.argv if argv is None else argv
    own = flags.FlagValues()
    text = flags.DEFINE_string("layout", None, "TP4,PP3,CP2,DP1,EP8, or with spaces", flag_values=own)
    dtype = flags.DEFINE_enum("dtype", "float64", ["float64", "float32"], "of all arithmetic", flag_values=own)
    as_json = flags.DEFINE_bool("json", False, "one line of JSON at the end", flag_values=own)
    config = config_or_exit(argv, own, __doc__ or "", simulated=True)
    if text.value is None:
        raise ConfigError("--layout is missing, for instance --layout=TP2,DP2,CP2")
    layout = parse_layout(text.value)
    try:
        arch = read_config(config.model.path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"config.model.path = {config.model.path!r}: {error}") from error
    if (parameters := count_parameters(arch)) > MOST_PARAMETERS:
        raise ConfigError(
            f"{config.model.path} has {parameters:.3g} parameters; at most {MOST_PARAMETERS:.0e} are computed on one "
            "CPU: verify the layout on a small model of its kind (configs/tiny_*.py)"
        )
    use_virtual_devices(layout.devices)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        spread, own_error = compare(config, arch, layout, dtype.value)
    report = judged(spread, own_error)
    print("\n".join(lines(spread, report)))
    if as_json.value:
        print(json.dumps(report))
    return 0 if report["ok"] else 1


def use_virtual_devices(count: int) -> None:
    """At least `count` devices of this CPU.

    Raises:
      LayoutError: where this process has fewer already and cannot get more.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:  # they are in use already
        if jax.device_count() < count:
            raise LayoutError(
                f"{count} devices are needed and this process has begun with {jax.device_count()}"
            ) from error


def judged(spread: Comparison, own_error: Comparison | None) -> dict[str, Any]:
    """What `--json` prints."""
    loss, update = LOSS_TOLERANCE, UPDATE_TOLERANCE
    allowed = {each.name: GRADIENT_TOLERANCE for each in spread.gradients}
    if own_error is not None:
        bound = lambda error: max(FLOAT32_FACTOR * error, FLOAT32_FLOOR)  # noqa: E731
        loss, update = bound(own_error.loss_error), bound(max(each.error for each in own_error.changes))
        allowed = {each.name: bound(each.error) for each in own_error.gradients}
    changed = max(spread.changes, key=lambda each: (each.error != each.error, each.error))
    fine = all(each.error <= allowed[each.name] for each in spread.gradients)
    return {
        "ok": bool(spread.loss_error <= loss and fine and changed.error <= update),
        "loss_rel_error": spread.loss_error,
        "worst_gradient_error": spread.worst.error,
        "worst_tensor": spread.worst.name,
        "worst_update_error": changed.error,
        "devices": spread.layout.devices,
    }


def lines(spread: Comparison, report: dict[str, Any], shown: int = 5) -> list[str]:
    """For people: the worst tensors."""
    worst = sorted(spread.gradients, key=lambda each: -each.error)[:shown]
    return [
        f"{spread.layout} on {report['devices']} devices: loss differs by {spread.loss_error:.2g} of a token's, "
        f"one update by {report['worst_update_error']:.2g} of its size",
        *(f"  gradient of {each.name}: {each.error:.2g} of its norm" for each in worst),
        f"it {'computes what one device does' if report['ok'] else 'DOES NOT compute what one device does'}",
    ]


if __name__ == "__main__":
    sys.exit(cli.run("verify-layout", sys.argv[1:]))
