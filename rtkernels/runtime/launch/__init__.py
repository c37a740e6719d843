"""From an image to a launch: devices (``device``), the record of a kernel (``kernel``), the driver call (``driver``,
the only file that launches), memory for results (``memory``), tensor maps and tables of addresses (``tensor_map``,
``tables``), and plans kept by metadata (``plans``). Knows no op.
"""
