"""Whatever is put into doctor, it answers or refuses with a reason; it never breaks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.doctor.environment.judge import judge as judge_environment
from paceline.doctor.environment.judge import variable_table
from paceline.doctor.environment.settings import parse_settings
from paceline.doctor.environment.situation import Situation
from paceline.doctor.hardware.judge import judge as judge_cards
from paceline.doctor.hardware.smi import parse_smi
from paceline.doctor.nccl.judge import judge as judge_log
from paceline.doctor.nccl.judge import log_table
from paceline.doctor.nccl.log import read_log
from paceline.doctor.topology.acs import judge_acs, parse_lspci
from paceline.doctor.topology.judge import judge as judge_topology
from paceline.doctor.topology.judge import topology_table
from paceline.doctor.topology.matrix import parse_matrices
from paceline.doctor.topology.picture import matrix_picture
from paceline.doctor.variables.known import KNOWN
from paceline.errors import ConfigError
from tests.doctor.hardware.machines import smi
from tests.doctor.nccl import logs
from tests.doctor.topology import nodes


def look_at(text: str) -> None:
    """All readers, and all that follows where they accept it."""
    log = read_log(text.splitlines())
    judge_log(log)
    log_table(log)
    for read in (_topology, _cards, _variables, _acs):
        try:
            read(text)
        except ConfigError as problem:
            assert problem.subject and problem.evidence and problem.next_step


def _topology(text: str) -> None:
    for matrix in parse_matrices(text, "t"):
        judge_topology(matrix, nodes=2)
        topology_table(matrix)
        matrix_picture(matrix)


def _cards(text: str) -> None:
    judge_cards(parse_smi(text, "t")[0])


def _variables(text: str) -> None:
    found, _ = parse_settings(text, "t")
    judge_environment(found, Situation(nodes=2, gpus_per_node=8, cores=4, interfaces=("lo",)))
    variable_table(found)


def _acs(text: str) -> None:
    list(judge_acs(parse_lspci(text, "t")))


@given(st.text(max_size=300))
@settings(max_examples=150, deadline=None)
def test_any_text(text: str) -> None:
    look_at(text)


TEXTS = [
    nodes.nvswitch(), nodes.NCCL_1130, nodes.CUBE_MESH, nodes.TWO_H200_IN_COLOUR, smi({}, {}), logs.TWO_NODES_2_27,
    logs.HOST_MEMORY, logs.NO_GPUDIRECT, "".join(logs.watchdog(rank) for rank in range(3)),
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_cut_and_garbled_texts(text: str) -> None:
    draw = random.Random(0)
    for _ in range(60):
        kind = draw.randrange(4)
        start, end = sorted(draw.randrange(len(text)) for _ in range(2))
        if kind == 0:
            changed = text[:end]
        elif kind == 1:
            changed = text[:start] + text[end:]
        elif kind == 2:
            changed = text.replace(draw.choice(text.split()), draw.choice(["", "NV999999", "\x00", "-1", "9" * 40]))
        else:
            lines = text.splitlines()
            draw.shuffle(lines)
            changed = "\n".join(lines)
        look_at(changed)


@given(st.dictionaries(st.sampled_from(sorted(KNOWN)), st.text(max_size=40), max_size=6))
@settings(max_examples=300, deadline=None)
def test_any_values_of_known_variables(environ: dict[str, str]) -> None:
    judge_environment(environ, Situation())
    judge_environment(environ, Situation(nodes=2, gpus_per_node=8, cores=4, interfaces=("lo", "eth0")))
    variable_table(environ)
