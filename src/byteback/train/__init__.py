# SPDX-License-Identifier: Apache-2.0
"""The trainer behind `byteback train`. docs/6-the-trainer.md says what it does and what it writes.

config.py, config_file.py, variants.py   the settings: flags, TOML, recipes with options
data/, networks.py                       images and networks by name
tasks.py, detect/                        what depends on the task: classification, video, detection
loop.py                                  trains one member of a run, from its first step to its last
schedule.py, checkpoint.py, files.py     parts of the loop
watch.py, histograms.py, board.py        records the numerics
side_by_side.py, results.py, display.py  all members of a run, their table, and the progress bar
evaluate.py, listing.py                  `byteback eval`, `byteback recipes` and `byteback models`
"""
