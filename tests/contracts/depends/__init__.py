"""Calls that are equal but for one thing that a call depends on (``rtkernels/runtime/depends.py``).

Each is made in a process that has replays of the call as it was before, and must do what it does in one that has none.
``device.py`` is the process's CUDA device, ``launches.py`` saves it from emulating a launch twice, ``calls.py`` has the
calls, ``changes.py`` what is changed, ``check.py`` compares, ``planted.py`` has defects that must be found,
``everything.py`` checks all of it with many processes.
"""
