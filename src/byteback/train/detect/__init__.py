# SPDX-License-Identifier: Apache-2.0
"""The task "detect": boxes around objects, scored by COCO's mean average precision.

annotations.py is what every layout is read into, voc.py and coco.py read them, source.py hands out batches; networks.py builds
torchvision's detectors, metrics.py scores them, showcase.py keeps some detections to look at, run.py trains them.
"""
