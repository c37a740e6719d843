"""One module per op family. Each declares an ``Op``; ``rtkernels._registry.ops()`` imports them all."""
