"""The accelerators that a run can be planned for: what makers publish of one device in their own 8-device machine.

Sources: data sheets of NVIDIA H100 SXM, H200 SXM, DGX B200, and HGX / DGX B300 (peak rates of bf16 without sparsity:
where a sheet gives the sparse rate, half of it). NVLink is given there as both directions together; here is one.
Network is that of one device: the machine's adapters, one a device (ConnectX-7: 400 Gb/s, ConnectX-8: 800 Gb/s).
"""

from __future__ import annotations

import dataclasses

from rlx.config.planning import DeviceName

GB = 10**9
# What driver, communication library and fragmentation leave of the memory. jax itself takes no more than
# XLA_PYTHON_CLIENT_MEM_FRACTION, which has to be set to this.
USABLE = 0.92


@dataclasses.dataclass(frozen=True)
class Device:
    name: DeviceName
    memory: int  # bytes
    flops: float  # a second, dense, bf16 with float32 sums
    bandwidth: float  # of its memory, bytes a second
    nvlink: float  # to the devices of its machine, bytes a second in one direction
    network: float  # to other machines, bytes a second in one direction

    @property
    def usable(self) -> int:
        return int(self.memory * USABLE)

    def flops_of(self, dtype: str) -> float:
        """float32 products run as TensorFloat-32 by default, at half the rate of bf16."""
        return self.flops if dtype == "bfloat16" else self.flops / 2


DEVICES: dict[DeviceName, Device] = {
    device.name: device
    for device in (
        Device("H100", 80 * GB, 989e12, 3.35e12, 450e9, 50e9),
        Device("H200", 141 * GB, 989e12, 4.8e12, 450e9, 50e9),
        Device("B200", 180 * GB, 2250e12, 8e12, 900e9, 50e9),
        Device("B300", 288 * GB, 2250e12, 8e12, 900e9, 100e9),
    )
}
