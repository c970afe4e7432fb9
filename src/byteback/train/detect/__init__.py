# SPDX-License-Identifier: Apache-2.0
"""The task "detect": boxes around objects, scored by the mean average precision of COCO.

voc.py and coco.py read data sets into the classes of annotations.py, and source.py makes batches of them. networks.py builds
the detectors of torchvision, run.py trains them, metrics.py scores them, showcase.py stores some detections for the report.
"""
