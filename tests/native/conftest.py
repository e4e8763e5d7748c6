"""Native engines in this process: none may leave anything behind."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def leaves_nothing(no_leaks: None) -> None:
    """Every test of this directory runs under the check for leaks."""
