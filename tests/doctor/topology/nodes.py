"""Nodes as `nvidia-smi topo -m` prints them; most are from public reports, which the names give."""

from __future__ import annotations

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""

NCCL_667 = """\
	GPU0	GPU1	GPU2	GPU3	CPU Affinity	NUMA Affinity
GPU0	 X 	PXB	SYS	SYS	0-27,56-83	0
GPU1	PXB	 X 	SYS	SYS	0-27,56-83	0
GPU2	SYS	SYS	 X 	PIX	28-55,84-111	1
GPU3	SYS	SYS	PIX	 X 	28-55,84-111	1
"""

NCCL_1130 = """\
        GPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    GPU7   NUMA
GPU0     X      NODE    NODE    NODE    SYS     SYS     SYS     SYS      0
GPU1    NODE     X      NODE    NODE    SYS     SYS     SYS     SYS      0
GPU2    NODE    NODE     X      NODE    SYS     SYS     SYS     SYS      0
GPU3    NODE    NODE    NODE     X      SYS     SYS     SYS     SYS      0
GPU4    SYS     SYS     SYS     SYS      X      NODE    NODE    NODE     1
GPU5    SYS     SYS     SYS     SYS     NODE     X      NODE    NODE     1
GPU6    SYS     SYS     SYS     SYS     NODE    NODE     X      NODE     1
GPU7    SYS     SYS     SYS     SYS     NODE    NODE    NODE     X       1
"""

TWO_PHB = """\
	GPU0	GPU1	CPU Affinity	NUMA Affinity	GPU NUMA ID
GPU0	 X 	PHB	0-31	0		N/A
GPU1	PHB	 X 	0-31	0		N/A
"""

TWO_H200_IN_COLOUR = (
    "\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t0-31\t0\t\tN/A\n"
    "NIC0\tSYS\tSYS\t X \t\t\t\t\n" + LEGEND + "\nNIC Legend:\n\n  NIC0: mlx5_0\n\n"
)


def nvswitch(count: int = 8, links: int = 18, nics: int = 8, cpus: str = "0-55,112-167") -> str:
    """GPUs behind NVSwitch, each with its own card (sgl-project/sglang #13973 and alike)."""
    half = count // 2
    gpus = [f"GPU{index}" for index in range(count)]
    cards = [f"NIC{index}" for index in range(nics)]
    lines = ["\t" + "\t".join([*gpus, *cards, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for one in range(count):
        row = [" X " if one == other else f"NV{links}" for other in range(count)]
        row += ["PIX" if one == card else "NODE" if (one < half) == (card < half) else "SYS" for card in range(nics)]
        lines.append("\t".join([f"GPU{one}", *row, cpus, "0" if one < half else "1", "", "N/A"]))
    for one in range(nics):
        row = ["PIX" if one == other else "NODE" if (one < half) == (other < half) else "SYS" for other in range(count)]
        row += [" X " if one == other else "NODE" for other in range(nics)]
        lines.append("\t".join([f"NIC{one}", *row]))
    names = "".join(f"  NIC{index}: mlx5_{index}\n" for index in range(nics))
    return "\n".join(lines) + "\n" + LEGEND + "\nNIC Legend:\n\n" + names


def pairs(order: tuple[int, ...] = (0, 1, 2, 3)) -> str:
    """Four cards with NVLink bridges between two and two."""
    mate = {order[0]: order[1], order[1]: order[0], order[2]: order[3], order[3]: order[2]}
    lines = ["\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity"]
    for one in range(4):
        row = [" X " if one == other else "NV4" if mate[one] == other else "SYS" for other in range(4)]
        lines.append("\t".join([f"GPU{one}", *row, "0-63", "0"]))
    return "\n".join(lines) + "\n"


CUBE_MESH = """\
        GPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    GPU7    mlx5_0  mlx5_2  CPU Affinity
GPU0     X      NV1     NV1     NV2     NV2     SYS     SYS     SYS     PIX     SYS     0-19,40-59
GPU1    NV1      X      NV2     NV1     SYS     NV2     SYS     SYS     PIX     SYS     0-19,40-59
GPU2    NV1     NV2      X      NV2     SYS     SYS     NV1     SYS     PHB     SYS     0-19,40-59
GPU3    NV2     NV1     NV2      X      SYS     SYS     SYS     NV1     PHB     SYS     0-19,40-59
GPU4    NV2     SYS     SYS     SYS      X      NV1     NV1     NV2     SYS     PIX     20-39,60-79
GPU5    SYS     NV2     SYS     SYS     NV1      X      NV2     NV1     SYS     PIX     20-39,60-79
GPU6    SYS     SYS     NV1     SYS     NV1     NV2      X      NV2     SYS     PHB     20-39,60-79
GPU7    SYS     SYS     SYS     NV1     NV2     NV1     NV2      X      SYS     PHB     20-39,60-79
mlx5_0  PIX     PIX     PHB     PHB     SYS     SYS     SYS     SYS      X      SYS
mlx5_2  SYS     SYS     SYS     SYS     PIX     PIX     PHB     PHB     SYS      X
"""
"""DGX-1 with V100."""

OLD_NAMES = CUBE_MESH.replace("SYS", "SOC")
