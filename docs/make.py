"""Write all that is generated from the sources of ops: ``python docs/make.py``, after an op was added or changed.

In this order, as each reads what the one before wrote: the table of public names (``make_public.py``), the stub for
type checkers (``make_stub.py``), the pages of the API (``make_api.py``), the table of batch invariance
(``make_invariance.py``).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = ("make_public.py", "make_stub.py", "make_api.py", "make_invariance.py")


def main() -> None:
    """Run the scripts, each in a process of its own."""
    for script in SCRIPTS:
        subprocess.run([sys.executable, str(Path(__file__).with_name(script))], check=True)


if __name__ == "__main__":
    main()
