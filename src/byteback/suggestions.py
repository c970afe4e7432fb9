# SPDX-License-Identifier: Apache-2.0
"""The error message for an unknown name: similar names, and the list of known names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 24  # the list of all networks of torchvision is too long to print


def unknown(where: str, what: str, name: str, known: Iterable[str], also: str = "") -> ValueError:
    """Returns the error for a name that is not in `known`.

    >>> print(unknown("train", "data set", "cifar", ["cifar10", "cifar100", "digits"]))
    train: unknown data set 'cifar'. Did you mean cifar10 or cifar100? Known names: cifar10, cifar100, digits.
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    there = f" Known names: {', '.join(names[:_SHOWN])}" + (", ..." if len(names) > _SHOWN else "") + "."
    there = "" if close and len(names) > _SHOWN else there
    return ValueError(f"{where}: unknown {what} {name!r}.{hint}{there}{' ' + also if also else ''}")
