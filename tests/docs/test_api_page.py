"""docs/api.md has every public name."""

from __future__ import annotations

import re

import pytest

import robust_dcp
from robust_dcp import megatron
from tests.docs.pages import DOCS

SHOWN = set(re.findall(r"^::: robust_dcp\.([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", sorted(set(robust_dcp.__all__) - {"__version__"}))
def test_a_public_name_is_in_the_api_reference(name: str) -> None:
    assert name in SHOWN


@pytest.mark.parametrize("name", megatron.__all__)
def test_a_public_name_for_megatron_is_in_the_api_reference(name: str) -> None:
    assert f"megatron.{name}" in SHOWN
