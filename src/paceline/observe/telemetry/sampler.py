"""One thread that looks at the machine about once a second; a step takes what was seen since the last one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from paceline.observe.telemetry.columns import SAMPLED, UNKNOWN

log = logging.getLogger(__name__)

Probe = Callable[[], Mapping[str, int]]


class Sampler:
    """Means of the samples since the last ``take``; of throttle reasons, all that were seen; where no sample is new,
    the last one.

    Args:
        probes: each gives some of `columns.SAMPLED`. One that raises is not asked again.
    """

    def __init__(self, probes: Sequence[Probe], *, seconds: float = 1.0) -> None:
        self._probes = list(probes)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._new: list[dict[str, int]] = []
        self._last = dict.fromkeys(SAMPLED, UNKNOWN)
        self._thread = threading.Thread(target=self._run, name="paceline-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def take(self) -> dict[str, int]:
        """By name of `columns.SAMPLED`."""
        with self._lock:
            new, self._new = self._new, []
        if new:
            self._last = {name: _join(name, [sample.get(name, UNKNOWN) for sample in new]) for name in SAMPLED}
        return self._last

    def sample(self) -> None:
        """Asks all probes once."""
        found: dict[str, int] = {}
        for probe in list(self._probes):
            try:
                found |= probe()
            except Exception as error:  # noqa: BLE001 - a probe that a container forbids must not end a run
                log.debug("a probe is left out from here on: %s", error)
                self._probes.remove(probe)
        with self._lock:
            self._new.append(found)
            # nobody takes: an evaluation, a long compilation
            del self._new[:-600]

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self.sample()


def _join(name: str, values: Sequence[int]) -> int:
    known = [value for value in values if value != UNKNOWN]
    if not known:
        return UNKNOWN
    if name == "gpu_throttle_bits":
        bits = 0
        for value in known:
            bits |= value
        return bits
    return round(sum(known) / len(known))
