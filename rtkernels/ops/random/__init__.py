"""Random numbers by Philox 4x32-10 under a seed on the device, and dropout. Device code: ``cuda_src/random/``. Uses no
other family. The numbers are not those that torch draws for a seed; the same seed of torch's generator gives the same
ones each time.
"""
