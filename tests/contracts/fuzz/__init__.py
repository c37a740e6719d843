"""A fuzzer from the declarations: every operator, public function and aten overload, with tensors in every layout.

A varied call must give what the same call gives on contiguous clones in fresh memory, or raise an ``ArgumentError``; it
must leave its inputs and all memory around tensors alone. ``memory.py`` has layouts and guard zones, ``calls.py`` what
is called, ``variations.py`` what is changed, ``check.py`` and ``aten.py`` run and compare.

``python -m tests.contracts.fuzz --device cuda --seconds 120 --seed 1`` runs all of it on a GPU.
"""
