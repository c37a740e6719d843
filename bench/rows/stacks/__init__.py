"""Rows of several layers in a row, as users run them: a diffusion transformer, the action expert of a policy."""
