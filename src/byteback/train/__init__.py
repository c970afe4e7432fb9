# SPDX-License-Identifier: Apache-2.0
"""The trainer behind `byteback train`. docs/6-the-trainer.md says what it does and what it writes.

config.py, config_file.py, variants.py   the settings: flags, TOML, recipes with options
data/, networks.py                       images and networks by name
tasks.py, detect/                        what depends on the task: classification, video, detection
loop.py                                  trains one member of a run, from its first step to its last
schedule.py, optimizers.py, layout.py    parts of the loop
checkpoints/                             checkpoints, and files that survive a crash
records/                                 the numerics, histograms of gradients, TensorBoard
ranks/                                   several processes that train together
side_by_side.py, results.py, display.py  all members of a run, their table, and the progress bar
weights.py, compact.py, saved.py         initial weights, and trained networks in files
evaluate.py, predict.py, export.py       the commands `byteback eval`, `predict` and `export`
listing.py                               `byteback recipes` and `byteback models`
"""
