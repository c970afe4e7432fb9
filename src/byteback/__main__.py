# SPDX-License-Identifier: Apache-2.0
"""python -m byteback, for where the console script is not on the path."""

from byteback.cli import main

main()
