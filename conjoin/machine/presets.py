"""Known machines: those of the papers, as the papers describe them, and a few in common use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conjoin.machine import preset_nodes
from conjoin.machine.limits import suggestion
from conjoin.machine.links import NodeKind
from conjoin.plugins import load_plugins

if TYPE_CHECKING:
    from conjoin.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class Preset:
    """A known machine: its nodes for any number of them, and that number where it is fixed."""

    name: str
    node: Callable[[int], NodeKind]
    description: str
    fixed_num_nodes: int | None = None


# A description names the devices and links, then where they are said to be so.
_TABLE = (
    Preset(
        "summit", preset_nodes.summit,
        "Summit supercomputer: two POWER9 and six V100 of 16 GB a node, three GPUs at each CPU joined by NVLink "
        "(50 GB/s each way), X-Bus between the CPUs (64 GB/s both ways together); EDR InfiniBand of 100 Gb/s on two "
        "rails, one at each CPU. Source: Unity, section 6.1; WikiChip for X-Bus and rails; NVIDIA's V100 data sheet.",
    ),
    Preset(
        "p3.8xlarge", preset_nodes.p3_8xlarge,
        "AWS p3.8xlarge: four V100 of 16 GB a node, joined by one or two NVLinks of 25 GB/s a pair; 10 Gb/s between "
        "nodes. Source: AlpaComm, section 5; the wiring of half a DGX-1; NVIDIA's V100 data sheet.",
    ),
    Preset(
        "p100-cluster", preset_nodes.p100_cluster,
        "FlexFlow's first cluster (4 nodes) and ROC's: four P100 a node, each pair joined by an NVLink of 20 GB/s; "
        "EDR InfiniBand of 100 Gb/s between nodes. "
        "Source: Jia's thesis, sections 3.7.1 and 4.7.1; NVIDIA's P100 data sheet.",
    ),
    Preset(
        "k80-cluster", preset_nodes.k80_cluster,
        "FlexFlow's second cluster (16 nodes): four K80 a node, adjacent pairs on a PCIe switch, both switches on one "
        "more; InfiniBand of 56 Gb/s between nodes. A K80 board has two GPUs, and a device is one of them. "
        "Source: Jia's thesis, section 3.7.1; NVIDIA's K80 data sheet.",
    ),
    Preset(
        "piz-daint", preset_nodes.piz_daint,
        "Piz Daint supercomputer: one P100 of 16 GB a node; 8.5 to 10 GB/s between nodes, of which the lower is taken. "
        "Source: AutoDDL, section 5.2.1; NVIDIA's P100 data sheet (PCIe).",
    ),
    Preset(
        "a100-2x16", preset_nodes.a100_16,
        "AutoDDL's two servers on Google Cloud: 16 A100 of 40 GB each, NVLink of 600 GB/s a GPU (300 each way); "
        "100 Gb/s between nodes. Source: AutoDDL, section 5.3.1; NVIDIA's A100 data sheet.",
        fixed_num_nodes=2,
    ),
    Preset(
        "dgx-a100", preset_nodes.dgx_a100,
        "NVIDIA DGX A100: eight A100 of 80 GB joined by NVSwitch, NVLink of 600 GB/s a GPU (300 each way); a network "
        "card of 200 Gb/s for each GPU. Source: NVIDIA's data sheets of DGX A100 and A100.",
    ),
    Preset(
        "dgx-h100", preset_nodes.dgx_h100,
        "NVIDIA DGX H100: eight H100 of 80 GB joined by NVSwitch, NVLink of 900 GB/s a GPU (450 each way); a network "
        "card of 400 Gb/s for each GPU. Source: NVIDIA's data sheets of DGX H100 and H100, rates without sparsity.",
    ),
    Preset(
        "dgx-h200", preset_nodes.dgx_h200,
        "NVIDIA DGX H200: eight H200 of 141 GB joined by NVSwitch, NVLink of 900 GB/s a GPU (450 each way); a network "
        "card of 400 Gb/s for each GPU. Source: NVIDIA's data sheets of DGX H200 and H200, rates without sparsity.",
    ),
    Preset(
        "dgx-a100-40", preset_nodes.dgx_a100_40,
        "NVIDIA DGX A100 320GB: as DGX A100, with eight A100 of 40 GB. "
        "Source: NVIDIA's data sheets of DGX A100 and A100.",
    ),
    Preset(
        "dgx-b200", preset_nodes.dgx_b200,
        "NVIDIA DGX B200: eight B200 of 180 GB joined by NVSwitch, NVLink of 1.8 TB/s a GPU (900 GB/s each way); a "
        "network card of 400 Gb/s for each GPU. Source: NVIDIA's data sheets of DGX B200 and HGX B200, rates without "
        "sparsity.",
    ),
    Preset(
        "gb200-nvl72", preset_nodes.gb200_nvl72,
        "NVIDIA GB200 NVL72, a rack as one node: 72 GPUs of 186 GB joined by NVSwitch, NVLink of 1.8 TB/s a GPU "
        "(900 GB/s each way); a network card of 400 Gb/s for each GPU. Source: NVIDIA's page of GB200 NVL72, rates "
        "without sparsity, its totals divided by 72.",
    ),
    Preset(
        "h100-pcie", preset_nodes.h100_pcie,
        "A server with eight H100 PCIe of 80 GB, pairs joined by a bridge of NVLink (600 GB/s, 300 each way), all by "
        "PCIe 5.0 (64 GB/s); one network card of 400 Gb/s. Source: NVIDIA's data sheet of H100; the server is no "
        "product's.",
    ),
    Preset(
        "h100-nvl", preset_nodes.h100_nvl,
        "A server with eight H100 NVL of 94 GB, pairs joined by a bridge of NVLink (600 GB/s, 300 each way), all by "
        "PCIe 5.0 (64 GB/s); one network card of 400 Gb/s. Source: NVIDIA's data sheet of H100; the server is no "
        "product's.",
    ),
    Preset(
        "mi300x", preset_nodes.mi300x,
        "AMD MI300X platform: eight MI300X of 192 GB, each pair joined by a link of Infinity Fabric (128 GB/s, 64 each "
        "way); a network card of 400 Gb/s for each GPU. Source: AMD's data sheets of MI300X and of the platform, rates "
        "without sparsity.",
    ),
    Preset(
        "p4d.24xlarge", preset_nodes.p4d,
        "AWS p4d.24xlarge: eight A100 of 40 GB joined by NVSwitch, NVLink of 600 GB/s a GPU (300 each way); four "
        "network cards of 100 Gb/s. Source: AWS's page of P4 instances; NVIDIA's A100 data sheet.",
    ),
    Preset(
        "p5.48xlarge", preset_nodes.p5,
        "AWS p5.48xlarge: eight H100 of 80 GB joined by NVSwitch, NVLink of 900 GB/s a GPU (450 each way); 3,200 Gb/s "
        "between nodes. Source: AWS's page of P5 instances; NVIDIA's H100 data sheet.",
    ),
    Preset(
        "a3-highgpu-8g", preset_nodes.a3_high,
        "Google Cloud A3 High: eight H100 of 80 GB joined by NVSwitch, NVLink of 900 GB/s a GPU (450 each way); four "
        "network cards of 200 Gb/s for the GPUs. Source: Google Cloud's page of GPU machine types; NVIDIA's H100 data "
        "sheet.",
    ),
    Preset(
        "a3-megagpu-8g", preset_nodes.a3_mega,
        "Google Cloud A3 Mega: eight H100 of 80 GB joined by NVSwitch, NVLink of 900 GB/s a GPU (450 each way); a "
        "network card of 200 Gb/s for each GPU. Source: Google Cloud's page of GPU machine types; NVIDIA's H100 data "
        "sheet.",
    ),
    Preset(
        "nd96asr-a100-v4", preset_nodes.nd_a100,
        "Azure ND96asr_v4: eight A100 of 40 GB joined by NVSwitch, NVLink of 600 GB/s a GPU (300 each way); a network "
        "card of 200 Gb/s for each GPU. Source: Azure's page of the ND A100 v4 series; NVIDIA's A100 data sheet.",
    ),
    Preset(
        "nd96isr-h100-v5", preset_nodes.nd_h100,
        "Azure ND96isr_H100_v5: eight H100 of 80 GB joined by NVSwitch, NVLink of 900 GB/s a GPU (450 each way); a "
        "network card of 400 Gb/s for each GPU. Source: Azure's page of the ND H100 v5 series; NVIDIA's H100 data "
        "sheet.",
    ),
    Preset(
        "g6e.48xlarge", preset_nodes.g6e,
        "AWS g6e.48xlarge: eight L40S of 48 GB by PCIe 4.0 (32 GB/s); 400 Gb/s between nodes. "
        "Source: AWS's page of G6e instances; NVIDIA's L40S data sheet.",
    ),
    Preset(
        "g5.48xlarge", preset_nodes.g5,
        "AWS g5.48xlarge: eight A10G of 24 GB by PCIe 4.0 (32 GB/s); 100 Gb/s between nodes. "
        "Source: AWS's page of G5 instances; NVIDIA's A10G data sheet.",
    ),
    Preset(
        "g4dn.12xlarge", preset_nodes.g4dn,
        "AWS g4dn.12xlarge: four T4 of 16 GB by PCIe 3.0 (16 GB/s); 50 Gb/s between nodes. "
        "Source: AWS's page of G4 instances; NVIDIA's T4 data sheet.",
    ),
    Preset(
        "laptop", preset_nodes.laptop,
        "One process on the CPU of any computer; the rates are round numbers and no product's, calibrate for yours.",
        fixed_num_nodes=1,
    ),
)  # fmt: skip

PRESETS = {preset.name: preset for preset in _TABLE}
OWN: dict[str, Machine] = {}
"""What programs have registered, by name."""


def preset_names() -> tuple[str, ...]:
    """The names that `Machine.preset` knows, but for those that a program registered.

    >>> preset_names()[:3]
    ('summit', 'p3.8xlarge', 'p100-cluster')
    """
    return tuple(PRESETS)


def registered_names() -> tuple[str, ...]:
    """The names that programs and installed packages have registered."""
    load_plugins("machines")
    return tuple(OWN)


def nearest_preset(name: str) -> str:
    """A sentence that names the machines with devices of that name, those of its family, or the nearest name.

    >>> nearest_preset("A10G"), nearest_preset("g5.12xlarge")
    ('Machines with such devices: g5.48xlarge; g5.48xlarge:1x4 is four of them.', \
'Machines of this family: g5.48xlarge; g5.48xlarge:1x4 is four devices of it.')
    """
    family, dot, _ = name.partition(".")
    same = [known for known in PRESETS if dot and known.startswith(f"{family}.")]
    if same:
        return f"Machines of this family: {', '.join(same)}; {same[0]}:1x4 is four devices of it."
    having = [known for known, preset in PRESETS.items() if _first_device(preset).startswith(f"{name[:60]}-".lower())]
    if having:
        return f"Machines with such devices: {', '.join(having)}; {having[0]}:1x4 is four of them."
    return suggestion(name, (*OWN, *PRESETS))


def _first_device(preset: Preset) -> str:
    return f"{preset.node(preset.fixed_num_nodes or 1).devices[0].name}-".lower()
