"""Flower's SuperNode in a process that ends when it gives up: `python -m silotune.distributed.flower.supernode …`.

Flower 1.42 tries again for ever where the network fails, but gives up for good after any error that mentions TLS or a
certificate: its main thread is over, other threads keep the process alive, and nobody starts it again.
"""

from __future__ import annotations

import os
import sys
import traceback

from silotune.distributed.flower.quick import run

LINK_LOST = 75
"""Exit code of a node that lost its link (EX_TEMPFAIL); who started it starts it again."""


def main() -> None:
    """Run `flower-supernode` with this process's arguments."""
    try:
        run(["flower-supernode", *sys.argv[1:]])
    except SystemExit:  # its own decision, with its reason
        raise
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(LINK_LOST)


if __name__ == "__main__":
    main()
