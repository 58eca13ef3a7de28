"""`paceline doctor` as a user runs it: exit codes, JSON, pages, files of other machines, bad input."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from paceline.cli.doctor import app
from paceline.cli.start import start
from paceline.doctor.hardware import live
from paceline.errors import ConfigError, PacelineError
from paceline.runtime.host import HostMemory
from tests.cli.commands import paceline
from tests.doctor.hardware.machines import Nvml, smi
from tests.doctor.nccl import logs
from tests.doctor.topology import nodes
from tests.report.pages import assert_readable

ROOT = Path(__file__).parent.parent.parent
LLAMA = str(ROOT / "recipes" / "llama3_8b.toml")


class Done(NamedTuple):
    code: int
    out: str
    error: str


def doctor(*arguments: str, stdin: str = "") -> Done:
    found = CliRunner().invoke(app, arguments, input=stdin)
    problem = found.exception
    if isinstance(problem, PacelineError):
        return Done(problem.exit_code, found.stdout, str(problem))
    assert problem is None or isinstance(problem, SystemExit), repr(problem)
    return Done(found.exit_code, found.stdout, found.stderr)


def ids(done: Done) -> dict[str, dict[str, Any]]:
    return {finding["id"]: finding for finding in json.loads(done.out)["findings"]}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "topo.txt").write_text(nodes.nvswitch())
    (tmp_path / "pairs.txt").write_text(nodes.pairs())
    (tmp_path / "smi.xml").write_text(smi({}, {"mig": "Enabled"}))
    (tmp_path / "env.txt").write_text("NCCL_IB_DISABLE=1\nNCCL_SOCKET_IFNAME=lo\nPATH=/bin\n")
    (tmp_path / "nccl.log").write_text(logs.TWO_NODES_2_27)
    (tmp_path / "sockets.log").write_text(logs.NO_DEVICE)
    return tmp_path


# ---- what is looked at


def test_a_matrix_needs_no_torch(files: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    done = paceline("doctor", "--topo", str(files / "topo.txt"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "all 8 GPUs are joined by NVLink" in done.stdout and "mlx5_0 (PIX)" in done.stdout


def test_standard_input() -> None:
    done = doctor("--topo", "-", stdin=nodes.NCCL_1130)
    assert done.code == 0 and "no NVLink between the 8 GPUs" in done.out


def test_files_speak_of_another_machine(files: Path) -> None:
    done = doctor("--topo", str(files / "topo.txt"), "--json")
    document = json.loads(done.out)
    assert set(document) == {"findings", "topology"}
    assert document["topology"]["groups"] == [list(range(8))] and document["topology"]["groups_over"] == "NVLink"
    assert document["topology"]["links"]["GPU0-GPU1"] == "NV18"


def test_everything_of_another_machine_with_a_recipe(files: Path) -> None:
    done = doctor(
        LLAMA, "--set", "parallel.tp=4", "--topo", str(files / "pairs.txt"), "--env", str(files / "env.txt"),
        "--gpus", "8", "--gpu", "H100-80", "--nodes-of", "4", "--json",
    )  # fmt: skip
    found = ids(done)
    assert done.code == 1
    assert found["topology.tp-crosses"]["severity"] == "warning"
    assert found["env.loopback"]["severity"] == "error" and found["env.ib-disabled"]["severity"] == "warning"
    assert "recipe.memory" in found or "recipe.refused" in found


def test_a_preset() -> None:
    done = doctor("llama3_8b", "--topo", "-", "--gpus", "8", "--gpu", "H100-80", "--json", stdin=nodes.nvswitch())
    assert "recipe.first-layout" in ids(done)


def test_smi_and_lspci(files: Path) -> None:
    done = doctor("--smi", str(files / "smi.xml"), "--json")
    assert done.code == 1 and ids(done)["hardware.mig"]["severity"] == "error"
    (files / "lspci.txt").write_text("00:01.0 PCI bridge: x\n\tACSCtl: SrcValid+ ReqRedir+ CmpltRedir+\n")
    assert "topology.acs" in ids(doctor("--lspci", str(files / "lspci.txt"), "--json"))


def test_the_matrix_says_how_many_gpus_there_are(files: Path) -> None:
    both = files / "two.txt"
    both.write_text(2 * nodes.nvswitch())
    for name, count in (("topo.txt", 8), ("two.txt", 16)):
        done = doctor(LLAMA, "--topo", str(files / name), "--set", "train.global_batch_size=16", "--json")
        assert not [one for one in json.loads(done.out)["findings"] if "one rank" in one["subject"]]
        assert f"There are {count} GPUs" in ids(done)["recipe.no-cluster"]["evidence"]


def test_variables_beside_a_recipe_of_another_machine(files: Path) -> None:
    env = files / "seen.txt"
    env.write_text("OMP_NUM_THREADS=64\nPYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n")
    done = doctor(LLAMA, "--topo", str(files / "topo.txt"), "--env", str(env), "--gpu", "H100-80", "--json")
    found = ids(done)
    assert found["env.threads"]["subject"] == "OMP_NUM_THREADS=64 for 8 processes on 112 cores"
    assert found["recipe.memory"]["severity"] == "warning"
    assert "expandable" not in found["recipe.memory"]["next_step"]
    env.write_text("OMP_NUM_THREADS=14\n")
    assert "env.threads" not in ids(doctor("--topo", str(files / "topo.txt"), "--env", str(env), "--json"))


# ---- this machine


def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: Any) -> str | None:
        return nodes.TWO_H200_IN_COLOUR if command[:2] == ("nvidia-smi", "topo") else None

    monkeypatch.setattr("paceline.cli.doctor_machine.look", lambda: live.look(nvml=Nvml(2), run=run))
    done = doctor(LLAMA, "--set", "cluster.nodes=0", "--json")
    document = json.loads(done.out)
    assert document["gpus"][0]["name"] == "NVIDIA H200" and document["topology"]["groups"] == [[0, 1]]
    assert "predicted" in document or "recipe.refused" in ids(done)
    assert "hardware.throttled" in ids(done)


def test_links_that_this_machine_tells_in_an_unknown_way(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = "\tGPU0\tGPU1\nGPU0\t X \tZZZ\nGPU1\tZZZ\t X \n"
    monkeypatch.setattr("paceline.cli.doctor_machine.look", lambda: live.look(nvml=Nvml(2), run=lambda command: odd))
    done = doctor("--json")
    assert "topology.unread" in ids(done) and "topology" not in json.loads(done.out)


def test_nvidia_smi_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "load_nvml", lambda: None)
    found = live.look(run=lambda command: smi({}, {}) if "-q" in command else None)
    assert len(found.cards) == 2 and found.driver == "580.82.07" and found.topology == ""


def test_only_what_programs_see_is_judged(files: Path) -> None:
    (files / "seen.txt").write_text("CUDA_VISIBLE_DEVICES=2,0\n")
    some = doctor("--topo", str(files / "pairs.txt"), "--env", str(files / "seen.txt"), "--json")
    assert ids(some)["topology.no-nvlink"]["subject"].startswith("no NVLink between the 2 GPUs")
    assert json.loads(some.out)["topology"]["devices"] == ["GPU2", "GPU0"]
    (files / "seen.txt").write_text("CUDA_VISIBLE_DEVICES=2,3\n")
    pair = doctor("--topo", str(files / "pairs.txt"), "--env", str(files / "seen.txt"), "--json")
    assert "all 2 GPUs are joined by NVLink" in ids(pair)["topology.groups"]["subject"]
    (files / "seen.txt").write_text("CUDA_VISIBLE_DEVICES=GPU-00000000\n")
    healthy = doctor("--smi", str(files / "smi.xml"), "--env", str(files / "seen.txt"), "--json")
    assert [card["index"] for card in json.loads(healthy.out)["gpus"]] == [0] and healthy.code == 0


def test_why_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "load_nvml", lambda: None)
    nothing = live.look(run=lambda command: None, devices=tmp_path)
    assert "nvidia-smi is not found" in nothing.why_not and "no /dev/nvidia0" in nothing.why_not
    (tmp_path / "nvidia0").touch()
    failed = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    broken = live.look(nvml=Nvml(fails="Driver Not Loaded"), run=lambda command: failed, devices=tmp_path)
    assert "Driver Not Loaded" in broken.why_not and "may not use it" in broken.why_not
    assert "has failed" in broken.why_not


def test_this_machine_without_gpus() -> None:
    done = paceline("doctor", "--json", NCCL_DEBUG="TRACE", CUDA__VISIBLE_DEVICES="0")
    document = json.loads(done.stdout)
    found = {finding["id"] for finding in document["findings"]}
    assert {"hardware.no-gpu", "env.debug", "env.misspelt"} <= found
    assert document["software"]["torch"] and document["host"]["cores"] >= 1


def test_a_cpu_recipe_on_this_machine() -> None:
    done = doctor(str(ROOT / "recipes" / "tiny.toml"), "--json")
    assert done.code in (0, 1)
    assert "recipe.no-cluster" in ids(done) and "hardware.no-gpu" in ids(done)


def test_what_train_refuses_for_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(total=int(23.5 * 2**30), available=20 * 2**30)
    monkeypatch.setattr("paceline.cli.doctor_memory.host_memory", lambda: memory)
    monkeypatch.setattr("paceline.cli.start.host_memory", lambda: memory)
    large = str(ROOT / "recipes" / "llama3_1b.toml")
    done = doctor(large, "--json")
    with pytest.raises(ConfigError) as refused:
        start(["train", large], large, (), None, lambda recipe, info: 0)
    finding = ids(done)["recipe.host-memory"]
    assert done.code == 1 and finding["severity"] == "error"
    assert finding["subject"] == refused.value.subject and "this host has 23.50 GiB" in finding["subject"]
    assert finding["next_step"] == refused.value.next_step
    off = doctor(large, "--set", "cluster.check_host_memory=false", "--json")
    assert off.code == 0 and ids(off)["recipe.host-memory"]["severity"] == "warning"
    assert "recipe.host-memory" not in ids(doctor(large, "--gpus", "4", "--gpu", "H100-80", "--json"))


# ---- logs


def test_logs(files: Path) -> None:
    done = doctor("nccl", str(files / "nccl.log"))
    assert done.code == 0 and "RDMA is used between nodes" in done.out and "P2P/CUMEM" in done.out
    both = doctor("nccl", str(files / "nccl.log"), str(files / "sockets.log"), "--json")
    assert "nccl.sockets" in ids(both) and json.loads(both.out)["ranks"] == 4
    assert doctor("nccl", "-", stdin=logs.NO_DEVICE).code == 0
    assert doctor("nccl", "-", stdin=logs.SMALL_SHM).code == 1
    card = doctor("nccl", "-", "--gpu", "NVIDIA H200", stdin="CUDA error 802 system not yet initialized\n")
    assert "nvidia-fabricmanager" in card.out


# ---- pages


def test_the_page(files: Path) -> None:
    page = files / "doctor.html"
    done = doctor("--topo", str(files / "topo.txt"), "--smi", str(files / "smi.xml"), "--html", str(page))
    text = page.read_text()
    assert done.code == 1 and f"Written: {page}" in done.out
    assert "<svg" in text and "hardware.mig" in text and "topology.groups" in text
    assert_readable(text)
    assert doctor("nccl", str(files / "nccl.log"), "--html", str(page)).code == 0
    assert "nccl.channels" in page.read_text()
    assert_readable(page.read_text())


def test_help_says_where_the_options_are() -> None:
    assert "paceline doctor check --help" in doctor("--help").out
    options = doctor("check", "--help").out
    assert "--nodes-of" in options and "default: 0" not in options


# ---- bad use


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--topo", "missing.txt"), "cannot be read"),
        (("--topo", "FOLDER"), "cannot be read"),
        (("--topo", "BINARY"), "binary file"),
        (("--topo", "EMPTY"), "It is empty"),
        (("--topo", "ENV"), "no link matrix"),
        (("--smi", "ENV"), "no output of nvidia-smi"),
        (("--env", "EMPTY"), "sets no variable"),
        (("--lspci", "ENV"), "no ACSCtl"),
        (("nccl", "EMPTY"), "no line of NCCL"),
        (("nccl", "BINARY"), "binary file"),
        (("nccl", "missing.log"), "cannot be read"),
        (("no_such_recipe",), "no recipe or preset"),
        (("llama3_8b", "--gpu", "H999", "--gpus", "8"), "no GPU 'H999'"),
        (("--topo", "TOPO", "--html", "no/such/folder/x.html"), "cannot be written"),
    ],
)
def test_bad_use_is_code_2(files: Path, arguments: tuple[str, ...], says: str) -> None:
    (files / "empty").touch()
    (files / "binary").write_bytes(b"\x7fELF\x00\x00" * 100)
    names = {"FOLDER": "", "BINARY": "binary", "EMPTY": "empty", "ENV": "env.txt", "TOPO": "topo.txt"}
    done = doctor(*(str(files / names[each]) if each in names else each for each in arguments))
    assert done.code == 2 and says in done.error


def test_recipes_that_could_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "Recipes in" not in doctor("nofile.toml").error
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    (tmp_path / "broken.toml").write_text("[model\n")
    (tmp_path / "mine.toml").write_text('[model]\npreset = "llama3_8b"\n')
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "longer.toml").write_text('extends = "../mine.toml"\n')
    done = doctor("nofile.toml")
    assert done.code == 2 and "Recipes in recipes: longer.toml. Recipes in .: mine.toml." in done.error
    assert done.error.count("longer.toml") == 1 == doctor("recipes/nofile.toml").error.count("longer.toml")


def test_utf16_as_powershell_writes_it(files: Path) -> None:
    (files / "wide.txt").write_bytes(nodes.NCCL_667.encode("utf-16"))
    assert doctor("--topo", str(files / "wide.txt")).code == 0


# ---- measuring


@pytest.mark.slow
def test_measuring_with_processes_of_our_own(tmp_path: Path) -> None:
    done = paceline("doctor", "--measure", "--nproc", "2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)["measured"]
    assert [one["rank"] for one in measured["ranks"]] == [0, 1] and measured["backend"] == "gloo"
    assert set(measured["pairs"]) == {"0-1", "1-0"}
    assert list(tmp_path.iterdir()) == [], "a CPU has nothing for the planner"


@pytest.mark.slow
def test_measuring_under_a_launcher_speaks_once(tmp_path: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "paceline", "doctor", str(ROOT / "recipes" / "tiny.toml"), "--measure", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    document = json.loads(done.stdout)  # one document, not two
    assert len(document["measured"]["ranks"]) == 2
    assert document["measured"]["ranks"][0]["rates"]["loader"] > 0
    assert done.returncode in (0, 1)


@pytest.mark.slow
def test_other_nodes_are_heard(tmp_path: Path) -> None:
    """Two nodes of one process each, of which the second has a leftover."""
    import socket
    import subprocess
    import sys

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in range(2):
        environ = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
        } | ({"NCCL_BUFFSIZE": "1024"} if rank else {})  # fmt: skip
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "paceline", "doctor", "--measure", "--json"],
                cwd=tmp_path,
                env={**os.environ, **environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    (first, error), (second, _) = (process.communicate(timeout=120) for process in started)
    assert started[0].returncode == started[1].returncode == 0, error
    document = json.loads(first)
    told = [one for one in document["findings"] if one["id"] == "env.override"]
    assert len(told) == 1 and f"{socket.gethostname()}: NCCL_BUFFSIZE=1024" in told[0]["subject"]
    assert set(document["measured"]["nodes"]) == {"0-1", "1-0"} and second == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--measure", "--topo", "TOPO"), "describe another"),
        (("--nproc", "2"), "goes with --measure"),
        (("--measure", "--out", "ENV"), "doctor did not make it"),
        (("--measure", "--out", "no/such/folder/c.toml"), "no such folder"),
    ],
)
def test_bad_use_of_measuring(files: Path, arguments: tuple[str, ...], says: str) -> None:
    names = {"TOPO": "topo.txt", "ENV": "env.txt"}
    done = doctor(*(str(files / names[each]) if each in names else each for each in arguments))
    assert done.code == 2 and says in done.error


def test_why_no_calibration_is_written(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.doctor.measured.machines import healthy

    measured = healthy(1, 2)
    unknown = replace(measured, ranks=tuple(replace(one, device="CPU") for one in measured.ranks))
    monkeypatch.setattr("paceline.cli.doctor_measure.measure_here", lambda config, wish, own: (unknown, []))
    out = files / "c.toml"
    finding = ids(doctor("--measure", "--out", str(out), "--json"))["measured.no-calibration"]
    assert f"{out} is not written" in finding["subject"] and "no CPU" in finding["evidence"] and not out.exists()
    assert "measured.no-calibration" not in ids(doctor("--measure", "--out", "", "--json"))


def test_a_measurement_is_judged_and_written(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.doctor.measured.machines import healthy

    monkeypatch.setattr("paceline.cli.doctor_measure.measure_here", lambda config, wish, own: (healthy(1, 2), []))
    monkeypatch.setattr("paceline.cli.doctor_machine.look", lambda: live.look(nvml=Nvml(2), run=lambda command: None))
    out, page = files / "c.toml", files / "page.html"
    for _ in range(2):  # our own file is replaced
        done = doctor("--measure", "--out", str(out), "--html", str(page))
        assert "all-reduce" in done.out or "all_reduce" in done.out
    assert "gemm_efficiency" in out.read_text() and "measured.calibration" in page.read_text()
    assert doctor("llama3_8b", "--gpus", "2", "--gpu", "H200", "--calibration", str(out), "--topo", "-",
                  stdin=nodes.TWO_H200_IN_COLOUR).code == 0  # fmt: skip
