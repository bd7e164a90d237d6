"""Cases that every change need not wait for: ``pytest --nightly`` runs them, too."""

import pytest


def nightly(*values):
    """Values of one parameter of a test."""
    return nightly_rows(*((value,) for value in values))


def nightly_rows(*rows):
    """Values of several parameters of a test."""
    return [pytest.param(*row, marks=pytest.mark.nightly) for row in rows]
