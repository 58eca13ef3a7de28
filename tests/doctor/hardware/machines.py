"""GPUs as `nvidia-smi -q -x` prints them (the parts that are read), and an NVML that answers from numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_GPU = """
  <gpu id="00000000:{index}A:00.0">
    <product_name>{name}</product_name>
    <persistence_mode>{persistence}</persistence_mode>
    <mig_mode><current_mig>{mig}</current_mig><pending_mig>{mig}</pending_mig></mig_mode>
    <uuid>GPU-0000000{index}</uuid>
    <pci><pci_gpu_link_info>
      <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>{gen}</current_link_gen></pcie_gen>
      <link_widths><max_link_width>16x</max_link_width><current_link_width>{width}x</current_link_width></link_widths>
    </pci_gpu_link_info></pci>
    <fb_memory_usage><total>143771 MiB</total><used>{used} MiB</used></fb_memory_usage>
    <ecc_mode><current_ecc>{ecc}</current_ecc></ecc_mode>
    <ecc_errors><volatile>
      <sram_correctable>0</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
      <dram_uncorrectable>{errors}</dram_uncorrectable>
    </volatile><aggregate><dram_uncorrectable>99</dram_uncorrectable></aggregate></ecc_errors>
    <remapped_rows><remapped_row_pending>{pending}</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure></remapped_rows>
    <temperature><gpu_temp>35 C</gpu_temp></temperature>
    <clocks><sm_clock>{clock} MHz</sm_clock></clocks>
    <max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_hw_thermal_slowdown>{thermal}</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <gpu_power_readings>
      <instant_power_draw>{power} W</instant_power_draw><current_power_limit>{limit} W</current_power_limit>
      <default_power_limit>700.00 W</default_power_limit>
    </gpu_power_readings>
    <processes>{processes}</processes>
    <fabric><state>{fabric}</state><status>{status}</status></fabric>
  </gpu>"""

_HEALTHY = {
    "name": "NVIDIA H200", "persistence": "Enabled", "mig": "Disabled", "gen": 5, "width": 16, "used": 4,
    "ecc": "Enabled",
    "errors": 0,
    "pending": "No", "clock": 345, "thermal": "Not Active", "power": "75.20", "limit": "700.00", "processes": "",
    "fabric": "Completed", "status": "Success",
}  # fmt: skip


def smi(*changes: dict[str, Any], driver: str = "580.82.07") -> str:
    """A GPU for each entry, healthy but for what it changes."""
    gpus = "".join(_GPU.format(index=index, **{**_HEALTHY, **change}) for index, change in enumerate(changes))
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n<nvidia_smi_log>'
        f"<driver_version>{driver}</driver_version><cuda_version>13.0</cuda_version>{gpus}\n</nvidia_smi_log>\n"
    )


class Nvml:
    """The functions of `pynvml` that are used; those in `silent` are not supported by this card."""

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_NVLINK_MAX_LINKS = 18

    class NVMLError(Exception):
        pass

    def __init__(
        self, count: int = 2, *, silent: frozenset[str] = frozenset(), links: int = 18, errors: int = 0, fails: str = ""
    ) -> None:
        self.count, self.silent, self.links, self.errors, self.fails = count, silent, links, errors, fails

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fails:
            raise self.NVMLError(self.fails)

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": b"580.82.07",
            "nvmlSystemGetCudaDriverVersion": 13000,
            "nvmlDeviceGetCount": self.count,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetName": b"NVIDIA H200",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=143771 * 2**20, used=2**20),
            "nvmlDeviceGetEccMode": (1, 1),
            "nvmlDeviceGetMigMode": (0, 0),
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceGetCurrentClocksEventReasons": 0x1 | 0x40,
            "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetClockInfo": 345,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
            "nvmlDeviceGetPowerUsage": 75_000,
            "nvmlDeviceGetTemperature": 35,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetP2PStatus": 0 if self.links else 1,
            "nvmlDeviceGetNvLinkState": 1,
            "nvmlDeviceGetNvLinkErrorCounter": self.errors,
            "nvmlDeviceGetTopologyCommonAncestor": 50,
        }
        if name not in values:
            raise AttributeError(name)

        def answer(*_: Any) -> Any:
            if name in self.silent:
                raise self.NVMLError("Not Supported")
            return values[name]

        return answer
