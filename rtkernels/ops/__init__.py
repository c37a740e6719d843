"""One folder per family of ops. Every op is a module that declares an ``Op``; ``runtime.operator.registry.ops()``
imports them all. Families use each other only downwards: ``tests/contracts/test_layers.py`` has the table.
"""
