"""Which environment variables does this process have? A copy, for rooms that judge them."""

from __future__ import annotations

import os


def environment() -> dict[str, str]:
    return dict(os.environ)
