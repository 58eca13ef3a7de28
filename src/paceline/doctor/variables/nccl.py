"""Environment variables of NCCL. Roles follow its user guide: what stands there under "System configuration" may stay
set, what stands under "Debugging" should not be kept in scripts.

Columns: name, default, accepted values (``01``, ``int``, ``count``, or a regular expression), meaning.
"""

from __future__ import annotations

from paceline.doctor.variables.variable import rows

_SOURCE = "NCCL user guide 2.32, Environment Variables"
_LEVEL = "(?i:LOC|NVL|PIX|PXB|PXN|P2C|PHB|SYS)|\\d"

NCCL = (
    *rows("system", _SOURCE, """
NCCL_SOCKET_IFNAME | - | - | network interfaces for bootstrap and sockets, by prefix; = exact, ^ all but these
NCCL_SOCKET_FAMILY | - | AF_INET6? | IPv4 or IPv6 only
NCCL_SOCKET_MAGIC | - | - | number that keeps jobs on one network apart
NCCL_SOCKET_RETRY_CNT | 34 | count | how often a refused connection is tried again
NCCL_SOCKET_RETRY_SLEEP_MSEC | 100 | count | wait before that, growing with each time
NCCL_SOCKET_POLL_TIMEOUT_MSEC | 0 | int | sleep while sockets are idle in start-up, for less CPU
NCCL_PSK | - | .{32,} | secret key that encrypts NCCL's own TCP traffic
NCCL_SOCKET_NTHREADS | - | [1-9]\\d? | CPU threads for each socket connection; only without RDMA
NCCL_NSOCKS_PERTHREAD | - | [1-9]\\d? | sockets of each of those threads
NCCL_CROSS_NIC | 2 | [012] | whether a ring may use different cards on different nodes
NCCL_IB_HCA | - | - | InfiniBand or RoCE cards to use, by prefix; = exact, ^ all but these
NCCL_IB_RAIL_POLICY | - | - | how ports are assigned to rails
NCCL_IB_TIMEOUT | 20 | int | InfiniBand's acknowledgement timeout, 4.096 us x 2^value; 0 waits for ever
NCCL_IB_RETRY_CNT | 7 | [0-7] | how often InfiniBand tries again
NCCL_IB_GID_INDEX | -1 | int | which GID a RoCE card uses (show_gids)
NCCL_IB_ADDR_FAMILY | AF_INET | AF_INET6? | IP family of the GID that NCCL chooses
NCCL_IB_ADDR_RANGE | - | - | range of the GID that NCCL chooses
NCCL_IB_ROCE_VERSION_NUM | 2 | [12] | RoCE version of that GID
NCCL_IB_PKEY | 0 | int | index of the InfiniBand partition
NCCL_IB_PKEY_VALUE | -1 | - | value of the InfiniBand partition
NCCL_IB_SL | 0 | int | InfiniBand service level
NCCL_IB_TC | 0 | int | InfiniBand or RoCE traffic class
NCCL_IB_FIFO_TC | - | int | traffic class of control messages
NCCL_IB_RETURN_ASYNC_EVENTS | 1 | 01 | reports events of the card, and stops on fatal ones
NCCL_IB_EVENT_BASED_LB | 0 | 01 | splits messages by the speed that ports have at the moment
NCCL_OOB_NET_ENABLE | 0 | 01 | start-up also goes over the fast network
NCCL_OOB_NET_IFNAME | - | - | interfaces for that
NCCL_UID_STAGGER_THRESHOLD | 256 | count | ranks beyond which start-up is staggered
NCCL_UID_STAGGER_RATE | 7000 | count | messages a second of that
NCCL_NET | - | - | the network to use: IB, Socket, or the name of a plugin
NCCL_NET_PLUGIN | - | - | network plugin to load
NCCL_GIN_PLUGIN | - | - | plugin for networking started by the GPU
NCCL_RMA_PLUGIN | - | - | plugin for one-sided operations
NCCL_TUNER_PLUGIN | - | - | plugin that chooses algorithms
NCCL_PROFILER_PLUGIN | - | - | plugin that records NCCL's events
NCCL_ENV_PLUGIN | - | - | plugin that supplies these variables
NCCL_IGNORE_CPU_AFFINITY | 0 | 01 | NCCL's threads go to the GPU's CPUs, whatever the job was given
NCCL_CONF_FILE | - | - | file with further variables
NCCL_DEBUG_FILE | - | - | where messages go; %h and %p stand for host and process
NCCL_DEBUG_TIMESTAMP_FORMAT | - | - | time in messages
NCCL_DEBUG_TIMESTAMP_LEVELS | - | - | messages that have a time
NCCL_COLLNET_ENABLE | 0 | 01 | reductions in the network (SHARP)
NCCL_COLLNET_NODE_THRESHOLD | 2 | int | nodes from which on
NCCL_CTA_POLICY | DEFAULT | - | few SMs for communication (EFFICIENCY, 1), or none where possible (ZERO, 2)
NCCL_NETDEVS_POLICY | - | (?i:AUTO|ALL|MAX:\\d+) | how many network cards a GPU uses
NCCL_MULTI_RANK_GPU_ENABLE | 0 | 01 | several ranks on one GPU
NCCL_TOPO_FILE | - | - | topology read from a file: made for another machine it misleads NCCL
NCCL_TOPO_DUMP_FILE | - | - | writes the topology to a file
NCCL_SET_THREAD_NAME | 0 | 01 | names NCCL's threads
NCCL_HOSTID | - | - | what ranks of one host have in common; containers need it where host names repeat
NCCL_COMM_ID | - | .+:\\d+ | address of rank 0, for programs without a rendezvous of their own
NCCL_RAS_ENABLE | 1 | 01 | the service that `ncclras` asks for the state of a job
NCCL_RAS_ADDR | localhost:28028 | - | its address
NCCL_RAS_TIMEOUT_FACTOR | 1 | [\\d.]+ | its patience
NCCL_MNNVL_ENABLE | 2 | [012] | NVLink between nodes (NVL72)
NCCL_MNNVL_UUID | - | - | name of that NVLink domain
NCCL_MNNVL_CLIQUE_ID | - | - | part of that domain
NCCL_IPC_USE_ABSTRACT_SOCKET | 1 | 01 | how processes of a node exchange handles; 0 for several containers on a node
"""),
    *rows("debug", _SOURCE, """
NCCL_DEBUG | VERSION | (?i:VERSION|WARN|ATTN|INFO|ABORT|TRACE) | messages of NCCL
NCCL_DEBUG_LEVELS | - | - | further messages
NCCL_DEBUG_SUBSYS | - | - | parts of NCCL that INFO speaks of
NCCL_CHECK_POINTERS | 0 | 01 | checks pointers at every call
NCCL_CHECK_MODE | DEFAULT | (?i:DEFAULT|DEBUG_LOCAL|DEBUG_GLOBAL) | checks arguments at every call
"""),
    *rows("override", _SOURCE, f"""
NCCL_P2P_DISABLE | 0 | 01 | GPUs of a node no longer reach each other directly: everything goes through host memory
NCCL_P2P_LEVEL | - | {_LEVEL} | how far apart two GPUs may be and still reach each other directly
NCCL_P2P_DIRECT_DISABLE | 0 | 01 | no direct access to user buffers within a process
NCCL_SHM_DISABLE | 0 | 01 | GPUs without peer access use the network instead of shared memory
NCCL_BUFFSIZE | 4194304 | count | bytes of a buffer between two GPUs
NCCL_NTHREADS | 512 | 64|128|256|512 | threads of a communication block
NCCL_MAX_NCHANNELS | - | count | most channels (older name of NCCL_MAX_CTAS)
NCCL_MIN_NCHANNELS | - | count | fewest channels (older name of NCCL_MIN_CTAS)
NCCL_MAX_CTAS | - | count | most SMs that communication takes
NCCL_MIN_CTAS | - | count | fewest SMs that communication takes
NCCL_LAUNCH_MODE | PARALLEL | (?i:PARALLEL|GROUP) | how kernels of several GPUs of a process are launched
NCCL_IB_DISABLE | 0 | 01 | InfiniBand and RoCE are not used: nodes talk over TCP sockets
NCCL_IB_AR_THRESHOLD | 8192 | int | bytes from which on adaptive routing is used
NCCL_IB_OOO_RQ | 0 | 01 | receives complete out of order
NCCL_IB_QPS_PER_CONNECTION | 1 | count | queue pairs of a connection
NCCL_IB_SPLIT_DATA_ON_QPS | 0 | 01 | splits each message over them
NCCL_IB_PCI_RELAXED_ORDERING | 2 | [012] | relaxed ordering on PCIe; 0 costs speed in virtual machines
NCCL_IB_ADAPTIVE_ROUTING | - | 01 | adaptive routing: on for InfiniBand, off for RoCE unless set
NCCL_IB_ECE_ENABLE | 1 | 01 | passes enhanced connection settings to the cards
NCCL_IB_MERGE_NICS | 1 | 01 | two ports of a card are one device
NCCL_IB_MERGE_VFS | 1 | 01 | virtual functions of a card are one device
NCCL_NET_MERGE_LEVEL | - | - | how far apart merged ports may be
NCCL_NET_MERGE_POLICY | ALL | (?i:ALL|RAIL) | which ports are merged
NCCL_MEM_SYNC_DOMAIN | 1 | 01 | memory domain of NCCL's kernels
NCCL_CUMEM_ENABLE | - | [012-]+ | NCCL's buffers come from cuMem functions
NCCL_CUMEM_HOST_ENABLE | - | [012-]+ | the same for host memory
NCCL_NET_GDR_LEVEL | - | {_LEVEL} | how far apart GPU and card may be for GPUDirect RDMA
NCCL_NET_GDR_C2C | 1 | 01 | GPUDirect through a processor that is joined to the GPU
NCCL_NET_GDR_READ | - | 01 | sends read GPU memory directly: 1 on NVLink machines unless set
NCCL_GDRCOPY_ENABLE | 0 | 01 | control words through GDRCopy
NCCL_GDRCOPY_FIFO_ENABLE | 1 | 01 | part of that
NCCL_GDRCOPY_SYNC_ENABLE | 1 | 01 | part of that
NCCL_GDRCOPY_FLUSH_ENABLE | 0 | 01 | part of that
NCCL_NET_SHARED_BUFFERS | 1 | 01 | one pool of buffers for all peers
NCCL_NET_SHARED_COMMS | 1 | 01 | connections are shared
NCCL_IGNORE_NET_MISMATCH | 1 | 01 | goes on where ranks have different numbers of network cards
NCCL_IGNORE_COLLNET_MISMATCH | 0 | 01 | the same for SHARP
NCCL_ALGO | - | - | algorithms that NCCL may use; from 2.24 on it fails instead of falling back to ring
NCCL_PROTO | - | - | protocols that NCCL may use; LL128 where it is not supported can corrupt data
NCCL_NVB_DISABLE | 0 | 01 | no NVLink paths through another GPU
NCCL_PXN_DISABLE | 0 | 01 | no use of another GPU's network card
NCCL_P2P_PXN_LEVEL | 2 | [012] | the same for sends
NCCL_PXN_C2C | 1 | 01 | the same over C2C
NCCL_RUNTIME_CONNECT | 1 | 01 | connections are made when they are needed
NCCL_GRAPH_REGISTER | 1 | 01 | registers buffers in CUDA graphs; Transformer Engine's want 0 with expandable segments
NCCL_LOCAL_REGISTER | 1 | 01 | registers buffers on request
NCCL_LEGACY_CUDA_REGISTER | 0 | 01 | registers cudaMalloc buffers; can hang
NCCL_WIN_ENABLE | 1 | 01 | window registration
NCCL_SET_STACK_SIZE | 0 | 01 | sets the stack size of kernels at the start
NCCL_GRAPH_MIXING_SUPPORT | 1 | 01 | CUDA graphs and plain calls may be mixed
NCCL_GRAPH_STREAM_ORDERING | 1 | 01 | orders communication in CUDA graphs
NCCL_RMA_EAGER_INIT | 0 | 01 | sets one-sided operations up at the start
NCCL_DMABUF_ENABLE | 1 | 01 | GPUDirect through the kernel's dma-buf
NCCL_P2P_NET_CHUNKSIZE | 131072 | count | bytes of a piece of send and receive
NCCL_P2P_LL_THRESHOLD | 16384 | int | bytes up to which sends use the low-latency protocol
NCCL_ALLOC_P2P_NET_LL_BUFFERS | 0 | 01 | buffers for that on all connections
NCCL_COMM_BLOCKING | - | 01 | calls may block
NCCL_CGA_CLUSTER_SIZE | - | [0-8] | blocks of a cluster
NCCL_NVLS_ENABLE | 2 | [012] | reductions in NVSwitch; 0 saves memory and costs all-reduce speed
NCCL_LAUNCH_ORDER_IMPLICIT | 0 | 01 | orders communicators of one GPU as they are called
NCCL_LAUNCH_RACE_FATAL | 1 | 01 | fails on races of launches
NCCL_SYM_GIN_KERNELS_ENABLE | 1 | 01 | kernels that start network transfers
NCCL_GRAPH_FILE | - | - | rings and trees read from a file
NCCL_GRAPH_DUMP_FILE | - | - | writes rings and trees to a file
NCCL_LL_BUFFSIZE | - | count | bytes of a buffer of the low-latency protocol
NCCL_LL128_BUFFSIZE | - | count | bytes of a buffer of LL128
NCCL_P2P_USE_CUDA_MEMCPY | 0 | 01 | copies by the copy engine instead of SMs
NCCL_P2P_READ_ENABLE | - | [01-]+ | peers read instead of being written to
NCCL_SHM_USE_CUDA_MEMCPY | 0 | 01 | the same for shared memory
NCCL_IB_USE_INLINE | 0 | 01 | small messages travel inside requests
NCCL_NET_FORCE_FLUSH | 0 | 01 | flushes after every receive
NCCL_WORK_FIFO_BYTES | - | count | queue of work
NCCL_CREATE_THREAD_CONTEXT | 0 | 01 | a CUDA context of its own for NCCL's threads
NCCL_NCHANNELS_PER_NET_PEER | - | count | channels to a peer over the network
NCCL_MIN_P2P_NCHANNELS | - | count | fewest channels of sends
NCCL_MAX_P2P_NCHANNELS | - | count | most channels of sends
"""),
    *rows("renamed", _SOURCE, """
NCCL_IB_GDR_LEVEL | - | - | NCCL_NET_GDR_LEVEL
NCCL_IB_CUDA_SUPPORT | - | - | NCCL_NET_GDR_LEVEL
NCCL_MAX_NRINGS | - | - | NCCL_MAX_CTAS
NCCL_MIN_NRINGS | - | - | NCCL_MIN_CTAS
NCCL_CHECKS_DISABLE | - | - |
NCCL_SINGLE_RING_THRESHOLD | - | - |
NCCL_LL_THRESHOLD | - | - |
NCCL_TREE_THRESHOLD | - | - |
NCCL_RINGS | - | - |
""".replace("- |\n", "- | -\n")),
)  # fmt: skip
