# SPDX-License-Identifier: Apache-2.0
"""The commands of ``python -m rawattn``, a module each: ``run(args)`` returns facts for JSON, and
the exit code.
"""
