# SPDX-License-Identifier: Apache-2.0
"""python -m byteback: the same as the console script, also if that is not on the path."""

from byteback.cli import main

main()
