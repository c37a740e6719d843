"""From sources to a checked image on disk: the include closure (``sources``), NVRTC (``nvrtc``), the key (``key``),
the cache (``cache``, ``store``, ``places``, ``locks``) and whose files it may load (``trust``). Text and bytes only,
no tensors and no devices: all of it runs without a GPU.
"""
