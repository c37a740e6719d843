"""The way of a public call: arrays of other libraries, ``out=``, recent calls, errors (``public.py``)."""
