# SPDX-License-Identifier: Apache-2.0
"""tune_malloc: keep large blocks in the process instead of handing them back to the system at every free.

glibc returns every block above 32 MB to the system when it is freed, and trims the top of its heap besides. The next
tensor of that size is then paged in anew, which can take longer than the convolution that fills it. PyTorch's float
layers suffer from this as much as ours.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 2**31 - 1  # mallopt takes an int


def tune_malloc() -> bool:
    """Asks glibc to keep freed memory for this process; False where there is no glibc to ask.

    Memory then stays at the process's peak. Call it once, before training.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, _LARGEST), (_M_TRIM_THRESHOLD, _LARGEST), (_M_TOP_PAD, 64 << 20))
    return all(mallopt(option, value) == 1 for option, value in settings)
