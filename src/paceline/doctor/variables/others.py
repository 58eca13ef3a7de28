"""Environment variables of CUDA, PyTorch, OpenMP, launchers and libraries beside them.

Columns: name, default, accepted values (``01``, ``int``, ``count``, ``true``, or a regular expression), meaning.
"""

from __future__ import annotations

from paceline.doctor.variables.variable import rows

_CUDA = "CUDA programming guide, Environment Variables"
_TORCH = "PyTorch documentation and the names in torch 2.13"
_MEGATRON = "Megatron-LM arguments, Transformer Engine documentation"
_GENERAL = "documentation of the library, from general knowledge"

CUDA = (
    *rows("system", _CUDA, """
CUDA_VISIBLE_DEVICES | - | - | GPUs that programs see, and their order
CUDA_DEVICE_ORDER | FASTEST_FIRST | FASTEST_FIRST|PCI_BUS_ID | how GPUs are numbered
CUDA_DEVICE_MAX_CONNECTIONS | 8 | [1-9]\\d? | hardware queues of a GPU
CUDA_MODULE_LOADING | LAZY | (?i:LAZY|EAGER) | when kernels are loaded
CUDA_MODULE_DATA_LOADING | - | (?i:LAZY|EAGER) | when their data is
CUDA_CACHE_PATH | - | - | where compiled kernels are kept
CUDA_CACHE_MAXSIZE | - | int | most bytes of that
CUDA_HOME | - | - | folder of the CUDA toolkit
CUDA_PATH | - | - | folder of the CUDA toolkit
CUDA_VERSION | - | - | set by images; nothing reads it at run time
CUDA_MPS_PIPE_DIRECTORY | - | - | of the multi-process service
CUDA_MPS_LOG_DIRECTORY | - | - | of the multi-process service
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE | 100 | [\\d.]+ | share of the SMs that a process gets
CUDA_SCALE_LAUNCH_QUEUES | - | - | length of launch queues
CUDA_GRAPHS_USE_NODE_PRIORITY | 0 | 01 | priorities of nodes in CUDA graphs
CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT | - | int | share of L2 for persisting data
CUDA_DISABLE_PERF_BOOST | 0 | 01 | keeps clocks low
CUBLAS_WORKSPACE_CONFIG | - | (:\\d+:\\d+)+ | workspaces of cuBLAS; :4096:8 makes it deterministic
CUBLASLT_WORKSPACE_SIZE | - | int | KiB of cuBLASLt's workspace
NVIDIA_VISIBLE_DEVICES | - | - | GPUs that a container gets
NVIDIA_DRIVER_CAPABILITIES | - | - | driver libraries that a container gets
NVIDIA_TF32_OVERRIDE | - | 01 | 0 switches TF32 off, whatever the program asks for
"""),
    *rows("debug", _CUDA, """
CUDA_LAUNCH_BLOCKING | 0 | 01 | waits for every kernel: no overlap, a step takes much longer
CUDA_COREDUMP_SHOW_PROGRESS | 0 | 01 | progress of core dumps
CUDA_ENABLE_COREDUMP_ON_EXCEPTION | 0 | 01 | core dumps of faults
CUDA_ENABLE_LIGHTWEIGHT_COREDUMP | 0 | 01 | small core dumps
CUDA_ENABLE_USER_TRIGGERED_COREDUMP | 0 | 01 | core dumps on request
CUDA_COREDUMP_FILE | - | - | their file
CUDA_LOG_FILE | - | - | CUDA's error log
CUDA_INJECTION64_PATH | - | - | a profiler's library is loaded into every process
CUDNN_LOGINFO_DBG | 0 | 01 | cuDNN's log
CUDNN_LOGLEVEL_DBG | 0 | [0-3] | cuDNN's log
CUBLAS_LOGINFO_DBG | 0 | 01 | cuBLAS's log
CUBLASLT_LOG_LEVEL | 0 | [0-5] | cuBLASLt's log
"""),
    *rows("override", _CUDA, """
CUDA_FORCE_PTX_JIT | 0 | 01 | compiles every kernel anew, from PTX
CUDA_DISABLE_PTX_JIT | 0 | 01 | no compilation from PTX
CUDA_FORCE_JIT | 0 | 01 | compiles every kernel anew
CUDA_DISABLE_JIT | 0 | 01 | no compilation
CUDA_CACHE_DISABLE | 0 | 01 | compiled kernels are not kept
CUDA_AUTO_BOOST | - | 01 | clocks above the base
CUDA_MANAGED_FORCE_DEVICE_ALLOC | 0 | 01 | where managed memory lies
"""),
)  # fmt: skip

TORCH = (
    *rows("system", _TORCH, """
PYTORCH_ALLOC_CONF | - | - | settings of the memory allocator
PYTORCH_CUDA_ALLOC_CONF | - | - | older name of PYTORCH_ALLOC_CONF
PYTORCH_HIP_ALLOC_CONF | - | - | older name of PYTORCH_ALLOC_CONF
PYTORCH_NVML_BASED_CUDA_CHECK | 0 | 01 | looks for GPUs without starting CUDA
PYTORCH_KERNEL_CACHE_PATH | - | - | where compiled kernels are kept
PYTORCH_VERSION | - | - | set by images; nothing reads it at run time
TORCH_NCCL_ASYNC_ERROR_HANDLING | 3 | [0-3] | what a failed collective does; 3 lets the flight recorder write
TORCH_NCCL_HIGH_PRIORITY | 0 | true | communication on streams of high priority
TORCH_NCCL_DUMP_ON_TIMEOUT | - | true | writes the flight recorder when a collective does not end
TORCH_NCCL_ENABLE_MONITORING | 1 | true | a thread that ends a process whose watchdog is stuck
TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC | - | int | its patience
TORCH_NCCL_COORD_CHECK_MILSEC | - | int | how often other ranks are asked
TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC | - | int | time to write the flight recorder
TORCH_NCCL_AVOID_RECORD_STREAMS | - | true | keeps tensors alive by reference; the usual way since torch 2.8
TORCH_NCCL_CUDA_EVENT_CACHE | 1 | true | events are used again
TORCH_NCCL_RANKS_PER_ROOT | - | int | ranks that start over one address
TORCH_NCCL_BCAST_UNIQUEID | 1 | true | how ranks learn the address
TORCH_NCCL_PROPAGATE_ERROR | 0 | true | tells other ranks of an error
TORCH_NCCL_RETHROW_CUDA_ERRORS | 1 | true | CUDA errors end the process
TORCH_NCCL_USE_COMM_NONBLOCKING | 0 | true | start-up does not block
TORCH_NCCL_NONBLOCKING_TIMEOUT | - | int | its patience
TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK | 0 | true | registers tensors with NCCL
TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING | - | true | one warning
TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN | - | true | stacks at an unclean end
TORCH_FR_BUFFER_SIZE | 2000 | int | collectives that the flight recorder keeps
TORCH_FR_DUMP_TEMP_FILE | - | - | where it writes
TORCH_FR_DUMP_DYNAMIC_FILE_NAME | - | - | where it writes
TORCH_GLOO_LAZY_INIT | - | true | connections of gloo are made when they are needed
TORCH_CUDA_ARCH_LIST | - | - | cards that extensions are compiled for
TORCH_EXTENSIONS_DIR | - | - | where extensions are compiled
TORCH_HOME | - | - | where torch keeps downloads
TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT | 10000 | int | plans that cuDNN keeps
TORCH_BLAS_PREFER_CUBLASLT | - | 01 | prefers cuBLASLt
TORCH_SYMMMEM_NBLOCKS | - | int | blocks of symmetric-memory kernels
TORCHINDUCTOR_CACHE_DIR | - | - | where compiled graphs are kept
TORCHINDUCTOR_COMPILE_THREADS | - | int | processes that compile
TORCHINDUCTOR_FX_GRAPH_CACHE | 1 | true | keeps compiled graphs
TORCHINDUCTOR_MAX_AUTOTUNE | 0 | true | tries more kernels; compiling takes longer
TORCHINDUCTOR_MAX_AUTOTUNE_GEMM | 0 | true | the same for matrix products
TORCHELASTIC_RESTART_COUNT | - | int | set by torchrun
TORCHELASTIC_MAX_RESTARTS | - | int | set by torchrun
TORCHELASTIC_RUN_ID | - | - | set by torchrun
TORCHELASTIC_USE_AGENT_STORE | - | - | set by torchrun
TORCHELASTIC_ERROR_FILE | - | - | set by torchrun
TORCHELASTIC_SIGNALS_TO_HANDLE | - | - | set by torchrun
TORCHELASTIC_ENABLE_FILE_TIMER | - | 01 | a timer of torchrun that ends workers which hang
TORCHELASTIC_TIMER_FILE | - | - | its file
TORCHELASTIC_HEALTH_CHECK_PORT | - | int | where torchrun answers for its health
TORCH_LOGS | - | - | messages of the compiler
TORCH_LOGS_OUT | - | - | where they go
"""),
    *rows("debug", _TORCH, """
TORCH_NCCL_BLOCKING_WAIT | 0 | true | the host waits for every collective: no overlap
TORCH_NCCL_DESYNC_DEBUG | 0 | true | says which rank fell out of step; costs a little at every collective
TORCH_NCCL_ENABLE_TIMING | 0 | true | times every collective
TORCH_NCCL_NAN_CHECK | 0 | true | looks for NaN in everything that is sent
TORCH_NCCL_EXTRA_DUMP_ON_EXEC | 0 | true | further flight recorder files
TORCH_DISTRIBUTED_DEBUG | OFF | (?i:OFF|INFO|DETAIL) | checks of collectives; DETAIL adds one to each
TORCH_CPP_LOG_LEVEL | - | - | messages of torch's C++ part
TORCH_SHOW_CPP_STACKTRACES | 0 | 01 | longer errors
TORCH_SHOW_DISPATCH_TRACE | 0 | 01 | prints every operator
TORCH_FR_CPP_STACK | 0 | true | C++ stacks in the flight recorder
TORCH_USE_CUDA_DSA | 0 | 01 | assertions in kernels; only in builds made for it
TORCH_COMPILE_DEBUG | 0 | 01 | writes all that the compiler does
TORCH_CUDNN_V8_API_DEBUG | 0 | 01 | cuDNN's choices
TORCHINDUCTOR_NAN_ASSERTS | 0 | 01 | looks for NaN in compiled code
TORCHINDUCTOR_PROFILE | 0 | 01 | times compiled kernels
PYTORCH_NO_CUDA_MEMORY_CACHING | 0 | 01 | every allocation goes to the driver: very slow
PYTORCH_API_USAGE_STDERR | 0 | 01 | prints the use of interfaces
"""),
    *rows("override", _TORCH, """
TORCH_COMPILE_DISABLE | 0 | 01 | nothing is compiled
TORCHDYNAMO_DISABLE | 0 | 01 | nothing is compiled
TORCHINDUCTOR_FORCE_DISABLE_CACHES | 0 | 01 | compiles anew at every start
TORCH_CUDNN_V8_API_DISABLED | 0 | 01 | the older interface of cuDNN
TORCH_ALLOW_TF32_CUBLAS_OVERRIDE | - | 01 | TF32 for all fp32 products, whatever the program says
TORCH_CUDNN_USE_HEURISTIC_MODE_B | - | 01 | how cuDNN chooses kernels
TORCH_DISABLE_ADDR2LINE | - | 01 | stacks without lines
"""),
    *rows("renamed", _TORCH, """
NCCL_ASYNC_ERROR_HANDLING | - | - | TORCH_NCCL_ASYNC_ERROR_HANDLING
NCCL_BLOCKING_WAIT | - | - | TORCH_NCCL_BLOCKING_WAIT
NCCL_DESYNC_DEBUG | - | - | TORCH_NCCL_DESYNC_DEBUG
NCCL_ENABLE_TIMING | - | - | TORCH_NCCL_ENABLE_TIMING
NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK | - | - | TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK
TORCH_NCCL_TRACE_BUFFER_SIZE | - | - | TORCH_FR_BUFFER_SIZE
TORCH_NCCL_TRACE_CPP_STACK | - | - | TORCH_FR_CPP_STACK
TORCH_NCCL_DEBUG_INFO_TEMP_FILE | - | - | TORCH_FR_DUMP_TEMP_FILE
"""),
)  # fmt: skip

OTHERS = (
    *rows("system", _GENERAL, """
OMP_NUM_THREADS | - | \\d+(,\\d+)* | CPU threads of a process for parallel loops
OMP_PROC_BIND | - | - | whether those threads stay where they are
OMP_PLACES | - | - | where they are
OMP_SCHEDULE | - | - | how loops are cut
OMP_WAIT_POLICY | - | (?i:ACTIVE|PASSIVE) | ACTIVE keeps idle threads spinning
OMP_DYNAMIC | - | (?i:TRUE|FALSE) | whether their number may change
OMP_STACKSIZE | - | - | stack of a thread
OMP_MAX_ACTIVE_LEVELS | - | int | nesting
OMP_THREAD_LIMIT | - | count | most threads in all
OMP_DISPLAY_ENV | - | - | prints these settings
MKL_NUM_THREADS | - | count | CPU threads of MKL
GLOO_SOCKET_IFNAME | - | - | network interface of gloo: an exact name, unlike NCCL's
GLOO_LOG_LEVEL | - | - | messages of gloo
GLOO_DEVICE_TRANSPORT | - | - | transport of gloo
UCX_NET_DEVICES | - | - | network devices of UCX
UCX_TLS | - | - | transports of UCX
UCX_IB_GPU_DIRECT_RDMA | - | - | GPUDirect in UCX
UCX_LOG_LEVEL | - | - | messages of UCX
UCX_MEMTYPE_CACHE | - | - | cache of kinds of memory in UCX
UCX_WARN_UNUSED_ENV_VARS | - | - | warnings of UCX
TRITON_CACHE_DIR | - | - | where Triton keeps kernels
NVSHMEM_BOOTSTRAP | - | - | start of NVSHMEM
NVSHMEM_IB_ENABLE_IBGDA | 0 | 01 | network transfers started by the GPU
NVSHMEM_DISABLE_P2P | 0 | 01 | no direct access between GPUs
NVSHMEM_SYMMETRIC_SIZE | - | - | memory of NVSHMEM
FI_PROVIDER | - | - | provider of libfabric: efa on AWS
FI_EFA_USE_DEVICE_RDMA | - | 01 | GPUDirect on EFA
FI_EFA_FORK_SAFE | - | 01 | safe forks on EFA
"""),
    *rows("system", _MEGATRON, """
NVTE_ALLOW_NONDETERMINISTIC_ALGO | 1 | 01 | 0 makes Transformer Engine deterministic and slower
NVTE_FLASH_ATTN | 1 | 01 | may use FlashAttention
NVTE_FUSED_ATTN | 1 | 01 | may use cuDNN's attention
NVTE_UNFUSED_ATTN | 1 | 01 | may use plain attention
NVTE_FWD_LAYERNORM_SM_MARGIN | 0 | int | SMs that norms leave to communication
NVTE_BWD_LAYERNORM_SM_MARGIN | 0 | int | SMs that norms leave to communication
NVTE_NORM_FWD_USE_CUDNN | 0 | 01 | norms of cuDNN
NVTE_NORM_BWD_USE_CUDNN | 0 | 01 | norms of cuDNN
NVTE_CPU_OFFLOAD_V1 | - | 01 | offloading of activations
NVTE_CUTEDSL_FUSED_GROUPED_MLP | - | 01 | fused grouped MLP
NVTE_FRAMEWORK | - | - | what Transformer Engine is built for
"""),
    *rows("debug", _MEGATRON, """
NVTE_DEBUG | 0 | 01 | messages of Transformer Engine
NVTE_DEBUG_LEVEL | 0 | [0-2] | messages of Transformer Engine
TRITON_INTERPRET | 0 | 01 | runs Triton's kernels in Python on the CPU: for tests alone
TRITON_PRINT_AUTOTUNING | 0 | 01 | messages of Triton
"""),
    *rows("launcher", _TORCH, """
RANK | - | int | number of this process
WORLD_SIZE | - | count | processes in all
LOCAL_RANK | - | int | number of this process on its node
LOCAL_WORLD_SIZE | - | count | processes on this node
GROUP_RANK | - | int | number of this node
MASTER_ADDR | - | - | host of rank 0
MASTER_PORT | - | count | its port
"""),
)  # fmt: skip
