from __future__ import annotations

import os
import signal
import threading

import pytest

from paceline.runtime.signals import StopRequest


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_first_signal_sets_the_flag_and_handlers_come_back(number: signal.Signals, exit_code: int) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop and stop.reason == number.name and stop.exit_code == exit_code
    assert signal.getsignal(number) is before


def test_second_interrupt_raises() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_only_request_works() -> None:
    seen = []

    def work() -> None:
        with StopRequest() as stop:
            stop.request("out of time")
            seen.append((bool(stop), stop.reason))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(True, "out of time")]
