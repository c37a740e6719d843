"""From sources to a verified image on disk.

The include closure (``sources``), NVRTC (``nvrtc``), the key (``key``), the cache (``cache``, ``store``, ``places``,
``locks``) and the owners of files it may load (``trust``). These modules handle text and bytes, no tensors and no
devices, so all of them run without a GPU.
"""
