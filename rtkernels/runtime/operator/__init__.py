"""What torch sees: operators with device code, reference and fake (``operator``), checks of their arguments
(``arguments``), plans that are run again (``plan``), gradients (``autograd``), DTensors (``sharding``), and the
registry of ops (``registry``). Knows no particular op.
"""
