"""Where do compiled kernels stay between runs?"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's own: kernels, graphs and what autograd made of them; Triton's cache lies inside it."""


def keep_compiled(environ: MutableMapping[str, str] | None = None) -> Path | None:
    """Gives torch.compile a folder that outlives runs and reboots, unless the user has named one.

    Torch's default lies in the temporary folder, which containers and reboots empty. Ours is ``paceline/compiled`` in
    ``XDG_CACHE_HOME`` or ``~/.cache``. Call before the first compilation; processes that are started later inherit it.

    Returns:
        the folder in use; None where ours cannot be written, and torch's default holds.
    """
    environ = os.environ if environ is None else environ
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    home = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 -- never raises
    folder = Path(home) / "paceline" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    environ[VARIABLE] = str(folder)
    return folder
