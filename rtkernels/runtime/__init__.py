"""From the text of a kernel to a call that torch sees; knows no op. The ground floor (``env``, ``targets``,
``layout``, ``cpus``, ``suggest``, ``torch_private``) imports nothing of ours but ``errors``; above it lie ``build``,
``launch`` and ``operator``, and ``warm``, which asks the registry.
"""
