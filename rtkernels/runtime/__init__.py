"""From the source of a kernel to a call that torch sees; knows no op.

The base modules (``env``, ``targets``, ``layout``, ``cpus``, ``suggest``, ``torch_private``) import nothing of ours but
``errors``. Above them are ``build``, ``launch`` and ``operator``, and ``warm``, which reads the registry.
"""
