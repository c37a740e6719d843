"""From an image to a launch; knows no op.

Devices (``device``), the record of a kernel (``kernel``), the driver call (``driver``, the only file that launches),
memory for results (``memory``), tensor maps and address tables (``tensor_map``, ``tables``), and plans cached by
metadata (``plans``).
"""
