"""Cases that every change need not wait for: ``pytest --nightly`` runs them, too."""

import pytest


def nightly(*values):
    """Values of one parameter of a test."""
    return nightly_rows(*((value,) for value in values))


def nightly_rows(*rows):
    """Values of several parameters of a test."""
    return [pytest.param(*row, marks=pytest.mark.nightly) for row in rows]


def each_choice(items):
    """Those of the tests with the mark ``each_choice`` that leave no value of any of their parameters out."""
    cases, chosen = {}, set()
    for item in items:
        if item.get_closest_marker("each_choice"):
            cases.setdefault(item.nodeid.partition("[")[0], {})[item] = set(item.callspec.indices.items())
    for choices in cases.values():
        missing = set().union(*choices.values())
        while missing:
            item = max(choices, key=lambda item: len(choices[item] & missing))
            missing -= choices[item]
            chosen.add(item)
    return chosen


def of_every_change(items):
    """The tests that every change waits for, in their order, and the others."""
    now = [item for item in items if not item.get_closest_marker("nightly")]
    chosen = each_choice(now)
    waited_for = {item for item in now if item in chosen or not item.get_closest_marker("each_choice")}
    return [item for item in items if item in waited_for], [item for item in items if item not in waited_for]
