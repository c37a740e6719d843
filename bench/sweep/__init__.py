"""``python -m bench sweep``: ours beside the best peer at random shapes, family by family.

``sizes`` has the distributions, ``families`` what is drawn of each family, ``measure`` times draws and keeps the result
file, ``statistics`` summarises it, ``supervise`` starts the processes, and ``command`` is the command line.
"""
