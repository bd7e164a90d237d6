"""The proof on a GPU: one run of at most 8 minutes, whose results docs/gpu.md shows.

``driver`` runs ``parts`` in workers, and appends a line to the results for each. Workers are ``correctness``,
``sanitizer``, ``rates``, ``steps``, ``plans``, ``truth`` and ``diagnosis``; each is a process that runs one case after
the other. ``page`` makes docs/gpu.md of the results. ``driver``, ``parts``, ``results`` and ``page`` need nothing but
Python 3.9.
"""
