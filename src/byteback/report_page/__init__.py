# SPDX-License-Identifier: Apache-2.0
"""`byteback report RUN...`: one HTML page that shows what runs of the trainer came to, and why.

    runs.py       folders → members: what each of them wrote, checked
    groups.py     members → groups that may be compared, with their table, curves and numerics
    pictures.py   histograms.jsonl → the papers' pictures of gradients
    findings.py   what the numbers say, in sentences
    page.py       all of it → one file
    static/       the style sheet and the scripts that go into the page; the charts are drawn there

The page needs no network and nothing beside it.
"""
