"""Known machines: those of the papers, as the papers describe them, and a few in common use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    """One node of a known machine, and how many nodes it has where that is fixed."""

    name: str
    devices_per_node: int
    device: str
    description: str
    fixed_num_nodes: int | None = None


# A description names the devices and links, then where they are said to be so.
_TABLE = (
    Preset(
        "summit", 6, "cuda",
        "Summit supercomputer: two POWER9 and six V100 a node, three GPUs at each CPU joined by NVLink; "
        "EDR InfiniBand of 100 Gb/s between nodes. Source: Unity, section 6.1.",
    ),
    Preset(
        "p3.8xlarge", 4, "cuda",
        "AWS p3.8xlarge: four V100 of 16 GB a node, joined by NVLink; 10 Gb/s between nodes. "
        "Source: AlpaComm, section 5.",
    ),
    Preset(
        "p100-cluster", 4, "cuda",
        "FlexFlow's first cluster (4 nodes) and ROC's: four P100 a node, joined by NVLink; EDR InfiniBand of 100 Gb/s "
        "between nodes. Source: Jia's thesis, sections 3.7.1 and 4.7.1.",
    ),
    Preset(
        "k80-cluster", 4, "cuda",
        "FlexFlow's second cluster (16 nodes): four K80 a node, adjacent pairs on a PCIe switch; InfiniBand of 56 Gb/s "
        "between nodes. Source: Jia's thesis, section 3.7.1.",
    ),
    Preset(
        "piz-daint", 1, "cuda",
        "Piz Daint supercomputer: one P100 of 16 GB a node; 8.5 to 10 GB/s between nodes. "
        "Source: AutoDDL, section 5.2.1.",
    ),
    Preset(
        "a100-2x16", 16, "cuda",
        "AutoDDL's two servers on Google Cloud: 16 A100 of 40 GB each, NVLink of 600 GB/s a GPU; 100 Gb/s between "
        "nodes. Source: AutoDDL, section 5.3.1.",
        fixed_num_nodes=2,
    ),
    Preset("dgx-a100", 8, "cuda", "NVIDIA DGX A100: eight A100 joined by NVSwitch. Source: NVIDIA's data sheet."),
    Preset("dgx-h100", 8, "cuda", "NVIDIA DGX H100: eight H100 joined by NVSwitch. Source: NVIDIA's data sheet."),
    Preset("dgx-h200", 8, "cuda", "NVIDIA DGX H200: eight H200 joined by NVSwitch. Source: NVIDIA's data sheet."),
    Preset("laptop", 1, "cpu", "One process on the CPU of any computer.", fixed_num_nodes=1),
)  # fmt: skip

PRESETS = {preset.name: preset for preset in _TABLE}


def preset_names() -> tuple[str, ...]:
    """The names that `Machine.preset` knows.

    >>> preset_names()[:3]
    ('summit', 'p3.8xlarge', 'p100-cluster')
    """
    return tuple(PRESETS)
