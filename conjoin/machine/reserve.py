"""What plans leave free of a device's memory: for what no tensor of the program takes.

On CUDA devices that is the context with its kernels and the workspaces of libraries, the buffers of communicators where
there are several devices, and what the allocator cannot use because it is cut up. The first two are of the size that is
commonly seen; that an allocator with growing segments loses a few percent is, too.
"""

from __future__ import annotations

from conjoin.machine.devices import DeviceType

CONTEXT_BYTES = 640 * 2**20
COMMUNICATOR_BYTES = 768 * 2**20
CUT_UP = 0.03
"""Of all memory."""


def usable_bytes(device: DeviceType, num_devices: int) -> int:
    """How much of a device's memory the tensors of a program may take on a machine of so many devices.

    >>> from conjoin.machine.preset_devices import H200
    >>> round(H200.memory_bytes / 2**30, 1), round(usable_bytes(H200, 8) / 2**30, 1)
    (139.8, 134.2)
    """
    if device.kind != "cuda":
        return device.memory_bytes
    fixed = CONTEXT_BYTES + (COMMUNICATOR_BYTES if num_devices > 1 else 0)
    return max(device.memory_bytes - fixed - round(CUT_UP * device.memory_bytes), device.memory_bytes // 2)
