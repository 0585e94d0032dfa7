# SPDX-License-Identifier: Apache-2.0
"""The commands of ``python -m rawattn``, a module each: ``run(args)`` returns facts for JSON, and
the exit code.
"""

import signal

INTERRUPTED = 128 + signal.SIGINT  # the exit code of a command that Ctrl+C ended, as shells say it
