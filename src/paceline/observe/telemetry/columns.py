"""What does a line of a rank's record hold? One schema for who writes it and who reads it.

Whole numbers only; ``UNKNOWN`` where there is nothing to say (no GPU, no NVML, not measured in this step). A name
ends in its unit. A line covers ``steps`` steps that end with ``step``; times, bytes and counts are sums over them,
levels (clock, memory, queues) are means or the latest.
"""

from __future__ import annotations

from paceline.observe.phases import PHASES

VERSION = 1
UNKNOWN = -1

AXES = ("dp", "tp", "cp", "ep", "pp", "rest")
"""Whose collectives are told apart; `AXIS_OF` sorts the others in."""

AXIS_OF = {"dp": "dp", "dp_cp": "dp", "edp": "dp", "world": "rest", "tp": "tp", "etp": "ep", "ep": "ep", "cp": "cp"} | {
    "pp": "pp"
}

HOST_PHASES = tuple(f"host_{phase}_us" for phase in PHASES)
"""Wall time of the host in each phase."""
DEVICE_PHASES = tuple(f"device_{phase}_us" for phase in PHASES)
"""Time on the GPU's stream between the marks; unknown on a CPU, where the host's is all there is."""
WAITS = tuple(f"wait_{axis}_us" for axis in AXES)
"""Held up by collectives of the axis: the host on a CPU, the GPU's stream on a GPU (there in ``timed_steps`` only)."""
BLOCKED = tuple(f"blocked_{phase}_us" for phase in PHASES)
"""The same time, by the phase it fell into."""
BYTES = tuple(f"sent_{axis}_kb" for axis in AXES)
"""Full tensors of its collectives."""

STEP = ("step", "steps", "time_ms", "wall_us")
"""``time_ms``: Unix time at the end of the last step. ``wall_us``: from start to start."""
HOST = ("thread_cpu_us", "thread_queue_us", "preempted", "gc_us", "gc_runs", "loader_ready")
"""The training thread on a processor, runnable but waiting for one, pushed off it; garbage collection; batches
ready."""
MEMORY = ("allocated_mb", "reserved_mb", "peak_mb", "alloc_retries")
GPU = ("gpu_clock_mhz", "gpu_memory_clock_mhz", "gpu_power_w", "gpu_temperature_c", "gpu_throttle_bits", "gpu_busy_pct")
MACHINE = (
    "cpu_busy_pct",
    "process_cpu_pct",
    "load_x100",
    "cpu_pressure_x100",
    "io_wait_pct",
    "host_free_mb",
    "rss_mb",
    "disk_read_kbs",
    "disk_write_kbs",
    "network_in_kbs",
    "network_out_kbs",
    "rdma_in_kbs",
    "rdma_out_kbs",
)
SAMPLED = (*GPU, *MACHINE)
"""Of the sampler thread, about once a second."""

COLUMNS = (*STEP, *HOST_PHASES, *DEVICE_PHASES, *WAITS, *BLOCKED, "timed_steps", *BYTES, *HOST, *MEMORY, *SAMPLED)
INDEX = {name: index for index, name in enumerate(COLUMNS)}

SUMMED = frozenset(
    (
        *("steps", "wall_us", *HOST_PHASES, *DEVICE_PHASES, *WAITS, *BLOCKED, "timed_steps", *BYTES),
        *("thread_cpu_us", "thread_queue_us", "preempted", "gc_us", "gc_runs"),
    )
)
"""Added up where a line covers several steps; of the others the latest stands."""

DIMENSIONS = {
    "GPU compute": ("device_forward_us", "gpu_clock_mhz", "gpu_busy_pct"),
    "GPU memory": MEMORY,
    "GPU power and heat": ("gpu_power_w", "gpu_temperature_c", "gpu_throttle_bits"),
    "CPU": ("cpu_busy_pct", "process_cpu_pct", "thread_queue_us", "load_x100"),
    "host memory": ("host_free_mb", "rss_mb"),
    "storage": ("disk_read_kbs", "disk_write_kbs", "io_wait_pct"),
    "network": ("network_in_kbs", "network_out_kbs", "rdma_in_kbs", "rdma_out_kbs"),
    "communication": (*WAITS, *BYTES),
    "framework": (*HOST_PHASES, *DEVICE_PHASES),
    "Python": ("gc_us", "gc_runs", "thread_cpu_us"),
    "data loader": ("loader_ready", "host_data_us"),
}
"""Every column joined on the step, by what it is about."""
