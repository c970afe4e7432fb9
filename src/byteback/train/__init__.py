# SPDX-License-Identifier: Apache-2.0
"""FLOOR 5: the trainer behind `byteback train`. docs/6-the-trainer.md says what it does and what it writes.

config.py, config_file.py, variants.py   what was asked: flags, TOML, recipes with options
data/, networks.py                       images and networks by name
loop.py                                  one member of a run, from its first step to its last
schedule.py, checkpoint.py, files.py     what the loop is made of
watch.py, histograms.py, board.py        what it sees of the numerics
side_by_side.py, results.py, display.py  all members of a run, their table, and how it goes
evaluate.py, listing.py                  the small commands
"""
