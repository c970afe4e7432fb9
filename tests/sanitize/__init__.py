# SPDX-License-Identifier: Apache-2.0
"""The kernels under sanitizers. `make sanitize` runs it.

build.py           the native library with AddressSanitizer and UndefinedBehaviorSanitizer, beside the ordinary one
plugin.py          makes pytest take that library
cases.py           drawn cases of the fuzz for it: every kernel on every path
threads.py         threads.cpp with ThreadSanitizer: the kernels without Python, called from several threads at once
gomp.cpp           OpenMP by threads that ThreadSanitizer understands
__main__.py        the command line
"""
