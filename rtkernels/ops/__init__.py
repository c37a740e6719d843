"""One module per op family. Each declares an ``Op``; ``rtkernels.runtime.operator.operator.ops()`` imports them all."""
