"""`paceline doctor nccl`: one or several logs as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from paceline.doctor.examination import Examination
from paceline.doctor.nccl.judge import judge, log_table
from paceline.doctor.nccl.log import read_log
from paceline.doctor.text_file import read_lines
from paceline.errors import ConfigError

_HOW = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV,GRAPH torchrun ... 2>&1 | tee nccl.log"


def read_logs(paths: Sequence[str], gpu: str) -> Examination:
    """What the logs say together.

    Raises:
        ConfigError: one cannot be read, or none has a line of NCCL.
    """
    opened: list[Iterator[str]] = [read_lines(path, "doctor nccl", _HOW) for path in paths]
    log = read_log(chain.from_iterable(opened))
    if not log.lines:
        raise ConfigError(
            f"{', '.join(paths[:4])}{' ...' if len(paths) > 4 else ''}: no line of NCCL",
            evidence="Lines of NCCL hold 'NCCL INFO' or 'NCCL WARN'; without NCCL_DEBUG there are none.",
            next_step=f"Log a start: {_HOW}",
        )
    return Examination(
        found=judge(log, card=gpu or None),
        tables=[log_table(log)],
        facts={
            "lines": log.lines,
            "versions": sorted(log.versions),
            "hosts": sorted(log.hosts),
            "ranks": log.num_ranks,
            "networks": dict(log.networks),
            "transports": dict(log.transports),
            "rings": {str(channel): list(ranks) for channel, ranks in sorted(log.rings.items())},
            "settings": log.settings,
        },
    )
