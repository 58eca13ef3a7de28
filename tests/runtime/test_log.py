from __future__ import annotations

import io
import logging
import warnings
from pathlib import Path

from paceline.report.console import make_console
from paceline.runtime.log import log_once, logging_to

LOGGER = logging.getLogger("paceline.tests")


def test_rank_0_speaks_to_console_and_file(tmp_path: Path) -> None:
    shown = io.StringIO()
    with logging_to(tmp_path / "logs", console=make_console(shown)):
        LOGGER.info("betas = [0.9, 0.95]")
        warnings.warn("old option")
    assert "betas = [0.9, 0.95]" in shown.getvalue() and "old option" in shown.getvalue()
    written = (tmp_path / "logs" / "rank_0.log").read_text()
    assert "[rank 0] INFO paceline.tests: betas = [0.9, 0.95]" in written and "old option" in written


def test_other_ranks_show_only_warnings(tmp_path: Path) -> None:
    shown = io.StringIO()
    with logging_to(tmp_path, rank=3, console=make_console(shown)):
        LOGGER.info("quiet")
        LOGGER.warning("loud")
        log_once(LOGGER, logging.WARNING, "said by rank 0")
    assert "quiet" not in shown.getvalue() and "[rank 3] loud" in shown.getvalue()
    assert "quiet" in (tmp_path / "rank_3.log").read_text()
    assert "said by" not in shown.getvalue() and "said by" in (tmp_path / "rank_3.log").read_text()


def test_log_once_and_clean_end(tmp_path: Path) -> None:
    before = list(logging.getLogger("paceline").handlers)
    for _ in range(2):  # what was said in one run is said again in the next
        shown = io.StringIO()
        with logging_to(tmp_path, console=make_console(shown)):
            for value in (1, 1, 2, 1):
                log_once(LOGGER, logging.WARNING, "slow path %d", value)
        assert shown.getvalue().count("slow path 1") == 1 and shown.getvalue().count("slow path 2") == 1
    assert (tmp_path / "rank_0.log").read_text().count("slow path 1") == 2
    assert logging.getLogger("paceline").handlers == before
