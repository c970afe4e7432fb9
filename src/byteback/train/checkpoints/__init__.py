# SPDX-License-Identifier: Apache-2.0
"""What survives a crash: `checkpoint.py` stores the state of a member, `files.py` has atomic files and journals."""
