"""Let `Ctrl-C` end the server that workers are forked from without a traceback while it imports.

`worker_pool` has it imported first, and the signal blocked until then. Once its imports are done, the server ignores
`Ctrl-C`, and ends with the process that started it.
"""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a job in a shell's background
    signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
