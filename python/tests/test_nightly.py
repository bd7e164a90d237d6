"""Which tests a change waits for."""

import itertools
import types

from nightly import each_choice, of_every_change


class Item:
    """What pytest has of a test."""

    def __init__(self, function, *marks, **values):
        self.nodeid, self._marks = f"{function}[{values}]", marks
        if values:
            self.callspec = types.SimpleNamespace(params=values)

    def get_closest_marker(self, name):
        return name if name in self._marks else None


def products(function, *marks):
    return [Item(function, *marks, a=a, b=b) for a, b in itertools.product("wxyz", (1, 2))]


def test_each_choice_has_every_value_as_often_as_others():
    found = sorted(tuple(item.callspec.params.values()) for item in each_choice(products("f")))
    assert [a for a, _ in found] == ["w", "x", "y", "z"]
    assert [sum(b == value for _, b in found) for value in (1, 2)] == [2, 2]


def test_a_change_waits_for_all_but_nightly_tests_and_the_rest_of_products():
    plain, later, alone = Item("plain"), Item("later", "nightly"), Item("alone", "each_choice")
    one, other, whole = products("one", "each_choice"), products("other", "each_choice"), products("whole")
    late = products("late", "each_choice", "nightly")
    items = [plain, later, *one, alone, *whole, *late, *other]
    now, rest = of_every_change(items)
    assert {plain, alone, *whole} <= {*now} and {later, *late} <= {*rest}
    assert [sum(item in now for item in of) for of in (one, other)] == [4, 4]
    assert sorted([*now, *rest], key=items.index) == items and sorted(now, key=items.index) == now
