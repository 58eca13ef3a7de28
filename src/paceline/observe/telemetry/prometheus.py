"""The newest step as a page that Prometheus reads: one small HTTP server a rank, on request.

Text format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

log = logging.getLogger(__name__)

Values = Mapping[str, float]


_IDLE_SECONDS = 10.0
"""A client that says nothing for so long is let go, and its thread with it."""


class _QuietServer(ThreadingHTTPServer):
    """What a client does to its connection is no news of the run."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a request for the Prometheus page failed", exc_info=True)


class PrometheusServer:
    """Serves ``/metrics`` on ``port`` until closed. A port that is taken, or is none, costs the page, not the run.

    Args:
        labels: on every sample, such as run and rank.
        values: name (without the prefix ``paceline_``) -> number; called for each request, by another thread.
    """

    def __init__(
        self, port: int, labels: Mapping[str, str], values: Callable[[], Values], *, host: str = "0.0.0.0"
    ) -> None:
        body = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())

        class Handler(BaseHTTPRequestHandler):
            timeout = _IDLE_SECONDS

            def do_GET(self) -> None:
                if self.path.split("?")[0] not in ("/metrics", "/"):
                    self.send_error(404)
                    return
                text = exposition(values(), body).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                """A request every few seconds is no news."""

        self._server: ThreadingHTTPServer | None = None
        try:
            self._server = _QuietServer((host, port), Handler)
        except (OSError, OverflowError) as error:
            log.warning("no Prometheus page on port %d: %s (observe.prometheus_port)", port, error)
            return
        threading.Thread(target=self._server.serve_forever, name="paceline-prometheus", daemon=True).start()

    @property
    def port(self) -> int | None:
        """Where it listens; None where it could not."""
        return None if self._server is None else int(self._server.server_address[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def exposition(values: Values, labels: str) -> str:
    """A sample a value, in the order given; what is not a number is left out. A name that ends in ``_total`` is of a
    counter, as Prometheus wants it."""
    lines = []
    for name, value in values.items():
        if value != value:
            continue
        full = f"paceline_{name}"
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE {full} {kind}", f"{full}{{{labels}}} {value:.10g}"]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
