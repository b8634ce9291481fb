"""docs/api.md has every public name."""

from __future__ import annotations

import re

import robust_dcp
from robust_dcp import megatron
from tests.docs.pages import DOCS

SHOWN = set(re.findall(r"^::: robust_dcp\.([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE))


NAMES = {*robust_dcp.__all__, *(f"megatron.{name}" for name in megatron.__all__)} - {"__version__"}


def test_every_public_name_is_in_the_api_reference() -> None:
    assert set() == NAMES - SHOWN
