"""Is traffic between GPUs behind one PCIe switch sent up to the processor? ACS flags in the text of ``lspci -vvv``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.report.finding import Finding

_DEVICE = re.compile(r"^((?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\s+(.*)$", re.IGNORECASE)
_HOW = "As root, or the flags are missing: sudo lspci -vvv > lspci.txt; paceline doctor --lspci lspci.txt."


@dataclass(frozen=True, kw_only=True)
class Bridge:
    """A device with ACS."""

    address: str
    """``3a:00.0``; empty where the text holds the flags alone."""
    name: str
    redirects: bool
    """Requests or completions of peers go up to the root."""


def parse_lspci(text: str, name: str) -> list[Bridge]:
    """Every device with ACS flags.

    Raises:
        ConfigError: the text has none, for want of rights or because it is something else.
    """
    found: list[Bridge] = []
    address = title = ""
    for line in text.splitlines():
        if match := _DEVICE.match(line.strip()):
            address, title = match[1], match[2]
        elif "ACSCtl:" in line:
            flags = set(line.split("ACSCtl:", 1)[1].split())
            redirects = bool(flags & {"ReqRedir+", "CmpltRedir+"})
            found.append(Bridge(address=address, name=title, redirects=redirects))
    if not found:
        denied = "access denied" in text.lower()
        raise ConfigError(
            f"{name} holds no ACSCtl line",
            evidence="It says <access denied>: lspci did not run as root."
            if denied
            else "It is empty."
            if not text.strip()
            else "Either no bridge has ACS, or this is no output of lspci -vvv.",
            next_step=_HOW,
        )
    return found


def judge_acs(bridges: list[Bridge]) -> Iterator[Finding]:
    """Whether peer access between GPUs can work."""
    on = [bridge for bridge in bridges if bridge.redirects]
    if not on:
        yield Finding(
            id="topology.acs-off",
            severity="note",
            subject=f"ACS redirects nothing on {len(bridges)} bridges",
            evidence="ReqRedir and CmpltRedir are off everywhere: GPUs behind one switch reach each other directly.",
            next_step="Nothing.",
        )
        return
    shown = ", ".join(filter(None, (bridge.address for bridge in on[:6])))
    yield Finding(
        id="topology.acs",
        severity="error",
        subject=f"ACS redirects peer traffic on {len(on)} of {len(bridges)} bridges" + (f": {shown}" if shown else ""),
        evidence="ReqRedir+ or CmpltRedir+ sends what one GPU writes to another up through the processor. With peer "
        "access on, NCCL then is slow, hangs or corrupts data (nccl #667, #2079).",
        next_step="Switch ACS off in the BIOS (with VT-d / AMD-Vi), or on a bare machine for this boot, as root: "
        f"setpci -s {on[0].address or 'BRIDGE'} ECAP_ACS+0x6.w=0000, for each bridge. Until then NCCL_P2P_DISABLE=1 "
        "works around it, slowly.",
    )
