"""Cases that every change need not wait for: ``pytest --nightly`` runs them, too."""

import collections

import pytest


def nightly(*values):
    """Values of one parameter of a test."""
    return nightly_rows(*((value,) for value in values))


def nightly_rows(*rows):
    """Values of several parameters of a test."""
    return [pytest.param(*row, marks=pytest.mark.nightly) for row in rows]


def values_of(item):
    """What tells a test of several of one function from the others."""
    return {(name, repr(value)) for name, value in item.callspec.params.items()} if hasattr(item, "callspec") else {()}


def each_choice(items):
    """The fewest tests of a function that leave no value of any of its parameters out, each as often as the others."""
    choices, chosen, uses = {item: values_of(item) for item in items}, set(), collections.Counter()
    while missing := set().union(*choices.values()) - set(uses):
        item = max(items, key=lambda item: (len(choices[item] & missing), -sum(uses[value] for value in choices[item])))
        uses.update(choices[item])
        chosen.add(item)
    return chosen


def of_every_change(items):
    """The tests that every change waits for, in their order, and the others."""
    now, functions = set(), {}
    for item in items:
        if item.get_closest_marker("nightly"):
            continue
        if item.get_closest_marker("each_choice"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
        else:
            now.add(item)
    now.update(*map(each_choice, functions.values()))
    return [item for item in items if item in now], [item for item in items if item not in now]
