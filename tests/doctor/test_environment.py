"""Every variable is judged by what it does, and by what the run needs of it."""

from __future__ import annotations

import pytest

from paceline.config.load import resolve
from paceline.config.run import RunConfig
from paceline.costs.hardware import find_hardware
from paceline.doctor.environment.communication import interfaces_matching
from paceline.doctor.environment.judge import judge, variable_table
from paceline.doctor.environment.settings import parse_settings
from paceline.doctor.environment.situation import Situation
from paceline.doctor.environment.visible import visible_gpus
from paceline.doctor.variables.known import KNOWN, meant_by
from paceline.doctor.variables.nccl import NCCL
from paceline.doctor.variables.others import CUDA, OTHERS, TORCH
from paceline.errors import ConfigError
from paceline.report.finding import Finding


def recipe(**parallel: object) -> RunConfig:
    return resolve({"model": {"preset": "llama3_8b"}, "train": {"seq_len": 4096}, "parallel": parallel}).config


def found(environ: dict[str, str], **situation: object) -> dict[str, Finding]:
    return {finding.id: finding for finding in judge(environ, Situation(**situation))}  # type: ignore[arg-type]


# ---- the table


def test_the_table_is_whole() -> None:
    everything = (*NCCL, *CUDA, *TORCH, *OTHERS)
    assert len(everything) == len(KNOWN) > 300, "a name stands twice"
    for variable in everything:
        assert variable.meaning and variable.source, variable.name
        assert not variable.default or variable.accepts(variable.default), variable.name


def test_no_default_and_no_right_value_is_complained_about() -> None:
    environ = {v.name: v.default for v in KNOWN.values() if v.default and v.role in ("override", "debug")}
    assert judge(environ, Situation(nodes=2, gpus_per_node=8)) == []


@pytest.mark.parametrize("name", [v.name for v in KNOWN.values() if v.role == "debug" and v.accepts("1")])
def test_every_debugging_switch_is_a_leftover(name: str) -> None:
    assert [one.severity for one in judge({name: "1"}, Situation())] in (["warning"], ["error"])


# ---- the cases


def test_infiniband_disabled_on_many_nodes() -> None:  # case 8
    assert found({"NCCL_IB_DISABLE": "1"}, nodes=2)["env.ib-disabled"].severity == "warning"
    assert "no proof of work" in found({"NCCL_IB_DISABLE": "1"}, nodes=2)["env.ib-disabled"].evidence
    assert found({"NCCL_IB_DISABLE": "1"}, nodes=1)["env.ib-disabled"].severity == "note"
    assert found({"NCCL_IB_DISABLE": "0"}, nodes=2) == {}


@pytest.mark.parametrize(
    ("parallel", "value", "warned"),
    [
        ({"tp": 2}, "", True),
        ({"tp": 2}, "1", False),
        ({"zero": 3}, "1", True),
        ({"zero": 3}, "", False),
        ({"zero": 3, "tp": 2}, "", False),
        ({"zero": 3, "tp": 2}, "1", True),
        ({}, "", False),
        ({}, "1", False),
    ],
)
def test_connections_by_backend(parallel: dict[str, int], value: str, warned: bool) -> None:  # case 18
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": value} if value else {}
    findings = found(environ, config=recipe(**parallel), card=find_hardware("H100 SXM"))
    assert (findings.get("env.connections", None) is not None) == warned
    if warned:
        assert "too late" in findings["env.connections"].next_step


def test_connections_before_blackwell_only() -> None:
    assert found({}, config=recipe(tp=2), card=find_hardware("B200 SXM")) == {}


def test_peer_access_off_is_named_a_workaround() -> None:  # cases 8 and 32
    finding = found({"NCCL_P2P_DISABLE": "1"}, gpus_per_node=8, card=find_hardware("H200 SXM"))["env.p2p-disabled"]
    assert "workaround" in finding.evidence and "450 GB/s" in finding.evidence
    assert "env.p2p-disabled" not in found({"NCCL_P2P_DISABLE": "1"}, gpus_per_node=1)
    assert "env.p2p-disabled" in found({"NCCL_P2P_LEVEL": "LOC"}, gpus_per_node=8)
    assert "env.shm-disabled" in found({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, gpus_per_node=2)


@pytest.mark.parametrize("value", ["lo", "=lo"])
def test_loopback_cannot_join_nodes(value: str) -> None:  # case 40 a
    assert found({"NCCL_SOCKET_IFNAME": value}, nodes=2)["env.loopback"].severity == "error"
    assert found({"NCCL_SOCKET_IFNAME": value})["env.loopback"].severity == "warning"
    assert found({"NCCL_SOCKET_IFNAME": value}, nodes=1) == {}


def test_different_interfaces_for_different_nodes_are_right() -> None:  # case 40
    assert found({"NCCL_SOCKET_IFNAME": "eno1,eth0"}, nodes=2, interfaces=("lo", "eth0")) == {}


def test_a_filter_that_matches_nothing_names_what_there_is() -> None:  # case 40 b
    finding = found({"NCCL_SOCKET_IFNAME": "=ib0"}, nodes=2, interfaces=("lo", "eth0", "ib01"))["env.no-interface"]
    assert finding.severity == "error" and "lo, eth0, ib01" in finding.evidence
    assert found({"GLOO_SOCKET_IFNAME": "eth"}, interfaces=("eth0",))["env.no-interface"].severity == "error"
    assert found({"GLOO_SOCKET_IFNAME": "=eth0"}, interfaces=("eth0",))["env.interface-syntax"].severity == "error"


def test_filters_as_nccl_reads_them() -> None:
    names = ("lo", "eth0", "eth1", "docker0", "docker1")
    assert interfaces_matching("eth", names) == ["eth0", "eth1"]
    assert interfaces_matching("=eth0,eth1", names) == ["eth0", "eth1"]
    assert interfaces_matching("^docker", names) == ["lo", "eth0", "eth1"]
    assert interfaces_matching("^=docker0", names) == ["lo", "eth0", "eth1", "docker1"]


def test_misspelt_names() -> None:  # case 79
    assert "CUDA_VISIBLE_DEVICES" in found({"CUDA__VISIBLE_DEVICES": "0"})["env.misspelt"].subject
    assert meant_by("NCCL_IB_DISABLED") == "NCCL_IB_DISABLE" and meant_by("PATH") is None
    assert found({"NCCL_NOT_THERE": "1"})["env.unknown"].severity == "note"
    assert found({"PATH": "/bin", "HOME": "/root", "LD_LIBRARY_PATH": "/lib"}) == {}


def test_a_process_without_a_launcher() -> None:  # case 79
    assert (
        "launcher" in found({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "WORLD_SIZE": "1"})["env.no-launcher"].subject
    )


# ---- single variables


@pytest.mark.parametrize(
    ("value", "id"),
    [
        ("", "env.no-visible-gpu"),
        ("-1", "env.no-visible-gpu"),
        ("NoDevFiles", "env.no-visible-gpu"),
        ("0,0", "env.gpu-twice"),
        ("0,2,-1,1", "env.hidden-gpu"),
        ("MIG-a,MIG-b", "env.mig"),
    ],
)
def test_visible_gpus(value: str, id: str) -> None:
    assert id in found({"CUDA_VISIBLE_DEVICES": value})
    assert found({"CUDA_VISIBLE_DEVICES": "0,1"}) == {}


@pytest.mark.parametrize(
    ("environ", "id"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "env.debug"),
        ({"NCCL_DEBUG": "INFO"}, "env.debug"),
        ({"NCCL_BUFFSIZE": "1048576"}, "env.override"),
        ({"NCCL_CROSS_NIC": "7"}, "env.value"),
        ({"NCCL_ALGO": "Tree"}, "env.no-ring"),
        ({"NCCL_PROTO": "LL128"}, "env.ll128"),
        ({"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}, "env.too-many-sockets"),
        ({"NCCL_NVLS_ENABLE": "0"}, "env.nvls-off"),
        ({"NCCL_IB_HCA": "mlx5_1"}, "env.hca-prefix"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "env.renamed"),
        ({"NCCL_TREE_THRESHOLD": "0"}, "env.renamed"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "env.error-handling"),
        ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "a:2"}, "env.two-allocators"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync,expandable_segments:True"}, "env.allocator"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, "env.allocator"),
        ({"TRITON_INTERPRET": "1"}, "env.interpreter"),
        ({"NCCL_DEBUG": "WARN"}, "env.messages"),
    ],
)
def test_each_rule(environ: dict[str, str], id: str) -> None:
    assert list(found(environ)) == [id]


def test_right_settings_stay_quiet() -> None:
    right = {
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1", "OMP_NUM_THREADS": "4",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_CROSS_NIC": "1", "NCCL_DEBUG_FILE": "/tmp/%h.%p",
        "CUDA_VISIBLE_DEVICES": "0,1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "CUDA_HOME": "/usr/local/cuda",
        "NCCL_SOCKET_IFNAME": "^docker,lo", "RANK": "0", "WORLD_SIZE": "2",
    }  # fmt: skip
    assert found(right, nodes=2, gpus_per_node=2, cores=16, interfaces=("lo", "eth0")) == {}


def test_what_images_and_torchrun_set() -> None:
    image = {
        "NCCL_VERSION": "2.27.3-1",
        "CUDNN_VERSION": "9.10",
        "CUDA_DRIVER_VERSION": "575",
        "PYTORCH_BUILD_NUMBER": "0",
    }
    assert found(image) == {}
    assert "set by an image" in variable_table(image).rows[0][3]
    torchrun = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "x",
    }
    assert {one.id: one.severity for one in found(torchrun).values()} == {"env.error-handling": "note"}


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        ("0,2,-1,1", [0, 2]),
        ("0,9,1", [0]),
        ("1,1", []),
        ("", []),
        ("GPU-aa,GPU-b", [0, 1]),
        ("GPU-a", []),  # the beginning of two
        ("MIG-1", [0, 1, 2, 3]),
    ],
)
def test_gpus_that_programs_see(value: str | None, seen: list[int]) -> None:
    variables = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible_gpus(variables, 4, ["GPU-aaa", "GPU-bbb", "GPU-abc", "GPU-d"]) == seen


def test_threads_against_cores() -> None:
    finding = found({"OMP_NUM_THREADS": "16"}, gpus_per_node=8, cores=64)["env.threads"]
    assert "128 threads" in finding.evidence and finding.next_step == "export OMP_NUM_THREADS=8"


def test_compiler_switched_off_against_the_recipe() -> None:
    off = {"TORCHDYNAMO_DISABLE": "1"}
    assert found(off, config=recipe(compile=True))["env.no-compile"].severity == "warning"
    assert found(off, config=recipe())["env.no-compile"].severity == "note"
    assert list(found(off)) == ["env.override"]


# ---- files


def test_lines_of_every_kind_are_read() -> None:
    text = (
        "\ufeff# a comment\r\nNCCL_DEBUG=INFO\r\n\r\nexport A='x y'\ndeclare -x B=\"1\"\nENV C=2\nsetenv D=3\n"
        "BASH_FUNC_f%%=() {  echo\n}\nEMPTY=\nNCCL_DEBUG=WARN\nE=a=b;\n"
    )
    variables, odd = parse_settings(text, "env.txt")
    assert variables == {"NCCL_DEBUG": "WARN", "A": "x y", "B": "1", "C": "2", "D": "3", "EMPTY": "", "E": "a=b"}
    assert [one.id for one in odd] == ["env.unread-lines", "env.set-twice"]


@pytest.mark.parametrize("text", ["", "\n\n", "hello\nworld\n"])
def test_a_file_without_variables_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="sets no variable"):
        parse_settings(text, "env.txt")


def test_secrets_are_not_shown() -> None:
    environ = {"NCCL_PSK": "k" * 40, "NCCL_DEBUG": "WARN", "HOME": "/root", "NCCL_MY_TOKEN": "hush"}
    shown = variable_table(environ)
    assert [row[0] for row in shown.rows] == ["NCCL_DEBUG", "NCCL_MY_TOKEN", "NCCL_PSK"]
    text = shown.to_text() + "".join(one.subject + one.evidence for one in judge(environ, Situation()))
    assert "kkk" not in text and "hush" not in text
