# SPDX-License-Identifier: Apache-2.0
"""`byteback report RUN...`: one HTML page with the results of runs of the trainer.

    runs.py        reads and checks what the members of a run wrote
    groups.py      forms groups of members that can be compared, with their table, curves and numerics
    pictures.py    the histograms of gradients of the papers, from histograms.jsonl
    detections.py  boxes and precision curves, from detections.json
    findings.py    describes the results in sentences
    page.py        writes the HTML file
    static/        the style sheet and the scripts of the page; the scripts draw the charts

The page is a single file and needs no network.
"""
