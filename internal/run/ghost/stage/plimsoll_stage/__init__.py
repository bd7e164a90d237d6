"""The stage of a program that trains on a GPU that is not there: launchers, the other ranks, weights, and a record."""


class Refused(Exception):
    """A program, or a part of it, that cannot be played."""
