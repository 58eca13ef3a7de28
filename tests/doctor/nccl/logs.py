"""What NCCL prints, of several versions; hosts and addresses are made up."""

from __future__ import annotations

NO_DEVICE = """\
NET/IB : No device found
NET/Socket : Using [0]eth0:<ip><0>
Using network Socket
"""
"""As in the report mosaicml/llm-foundry #336."""

DISABLED = """\
node1:100:200 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
node1:100:200 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation
node1:100:200 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
node1:100:200 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
node1:100:200 [0] NCCL INFO Using network Socket
node2:100:200 [0] NCCL INFO Using network Socket
"""

TWO_NODES_2_27 = """\
node1:982:1255 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to enp9s0np0
node1:982:1255 [0] NCCL INFO Bootstrap: Using enp9s0np0:10.99.0.2<0>
node1:982:1255 [0] NCCL INFO cudaDriverVersion 13000
node1:982:1255 [0] NCCL INFO NCCL version 2.27.6+cuda13.0
node1:982:1255 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB enp9s0np0:10.99.0.2<0>
node1:982:1255 [0] NCCL INFO Using network IB
node1:982:1255 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
node1:982:1255 [0] NCCL INFO comm 0x55cc8aa rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 1c000 commId 0xabc - Init START
node1:983:1256 [1] NCCL INFO comm 0x55cc8ab rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId 1d000 commId 0xabc - Init START
node2:982:1255 [0] NCCL INFO comm 0x55cc8ac rank 2 nranks 4 cudaDev 0 nvmlDev 0 busId 1c000 commId 0xabc - Init START
node2:983:1256 [1] NCCL INFO comm 0x55cc8ad rank 3 nranks 4 cudaDev 1 nvmlDev 1 busId 1d000 commId 0xabc - Init START
node1:982:1255 [0] NCCL INFO Channel 00/02 : 0 1 2 3
node1:982:1255 [0] NCCL INFO Channel 01/02 : 0 1 2 3
node1:982:1255 [0] NCCL INFO 2 coll channels, 0 collnet channels, 16 nvls channels, 8 p2p channels, 2 p2p channels per peer
node1:982:1255 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node2:982:1255 [0] NCCL INFO Channel 00/0 : 2[0] -> 3[1] via P2P/CUMEM
node1:983:1256 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/1/GDRDMA
node2:983:1256 [1] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [send] via NET/IB/1/GDRDMA
node1:982:1255 [0] NCCL INFO Connected all rings
node1:982:1255 [0] NCCL INFO ncclCommInitRank comm 0x55cc8aa rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 1c000 commId 0xabc - Init COMPLETE
node1:983:1256 [1] NCCL INFO ncclCommInitRank comm 0x55cc8ab rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId 1d000 commId 0xabc - Init COMPLETE
node2:982:1255 [0] NCCL INFO ncclCommInitRank comm 0x55cc8ac rank 2 nranks 4 cudaDev 0 nvmlDev 0 busId 1c000 commId 0xabc - Init COMPLETE
node2:983:1256 [1] NCCL INFO ncclCommInitRank comm 0x55cc8ad rank 3 nranks 4 cudaDev 1 nvmlDev 1 busId 1d000 commId 0xabc - Init COMPLETE
"""  # noqa: E501

HOST_MEMORY = """\
node1:1:2 [0] NCCL INFO NCCL version 2.19.3+cuda12.3
node1:1:2 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1
node1:1:2 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1000 commId 0x7 - Init START
node1:2:2 [1] NCCL INFO comm 0x2 rank 1 nranks 2 cudaDev 1 busId 2000 commId 0x7 - Init START
node1:1:2 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
node1:2:2 [1] NCCL INFO Channel 00 : 1[1] -> 0[0] via SHM/direct/direct
node1:1:2 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1000 commId 0x7 - Init COMPLETE
node1:2:2 [1] NCCL INFO comm 0x2 rank 1 nranks 2 cudaDev 1 busId 2000 commId 0x7 - Init COMPLETE
"""
"""As in the report NVIDIA/nccl #1130."""

OLD_2_4 = """\
ip-1:45361:45361 [0] NCCL INFO NET/IB : No device found.
ip-1:45361:45361 [0] NCCL INFO NET/Socket : Using [0]ens3:172.31.12.210<0>
NCCL version 2.4.8+cuda10.1
ip-1:45361:45400 [0] NCCL INFO Ring 00 : 0[0] -> 1[1] [send] via NET/Socket/0
"""

NO_GPUDIRECT = """\
hostname1:25668:27396 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB primaryip:10.10.10.10<0>
hostname1:25668:27396 [0] NCCL INFO Using network IB
hostname1:25668:27396 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'
hostname1:25668:27396 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 1 'mlx5_1'
hostname1:25668:27396 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0
"""
"""As in the report NVIDIA/nccl #1537."""

SMALL_SHM = """\
node1:1:9 [0] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device
node1:1:9 [0] include/shm.h:41 NCCL WARN Error while creating shared memory segment nccl-shm-recv-6ad2-0-1-0 (size 9637888)
"""  # noqa: E501
"""As in the report NVIDIA/nccl #342."""

WATCHDOG = (
    "[rank{rank}]:[E1127 10:00:00.1 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={sequence}, OpType={operation}, NumelIn={elements}, NumelOut={elements}, "
    "Timeout(ms)=600000) ran for 600094 milliseconds before timing out.\n"
    "[rank{rank}]:[E1127 10:00:00.2 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0 Rank {rank}] Exception (either an "
    "error or timeout) detected by watchdog at work: {sequence}, last enqueued NCCL work: 1582, last completed NCCL "
    "work: 1579.\n"
)


def watchdog(rank: int, sequence: int = 1580, operation: str = "ALLREDUCE", elements: int = 65536) -> str:
    return WATCHDOG.format(rank=rank, sequence=sequence, operation=operation, elements=elements)
