"""``python -m bench campaign``: a short time on a GPU machine, spent on what has never run on one first."""
