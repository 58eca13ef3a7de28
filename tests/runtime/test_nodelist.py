from __future__ import annotations

import pytest

from paceline.errors import LaunchError
from paceline.runtime.nodelist import expand_nodelist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("a[8-11]", ["a8", "a9", "a10", "a11"]),
        ("rack[1-2]n[1-2]-ib", ["rack1n1-ib", "rack1n2-ib", "rack2n1-ib", "rack2n2-ib"]),
        ("n-[098-101]", ["n-098", "n-099", "n-100", "n-101"]),
        ("x[5]", ["x5"]),
        ("a-1.cluster,b-2.cluster", ["a-1.cluster", "b-2.cluster"]),
    ],
)
def test_expansion(text: str, hosts: list[str]) -> None:
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize("text", ["", "gpu[1-", "gpu1-3]", "gpu[[1]]", "gpu[a-c]", "gpu[1-x]"])
def test_unreadable_lists_name_the_text(text: str) -> None:
    with pytest.raises(LaunchError, match="MASTER_ADDR") as caught:
        expand_nodelist(text)
    assert repr(text) in caught.value.subject
