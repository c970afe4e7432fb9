# SPDX-License-Identifier: Apache-2.0
"""The names that were once in byteback.report and byteback.memory.

A pickled Summary, Health or MemoryReport stores the name of the module that defined its class. byteback/__init__.py registers
this module under both old names in sys.modules, so that pickles of earlier versions can be loaded. There is no file memory.py
instead, because importing it would replace the function byteback.memory by the module.
"""

from byteback.inspect.health import Health, RoleHealth, health
from byteback.inspect.memory import MemoryReport, as_it_was, memory, peak_growth, resident, tune_malloc
from byteback.inspect.summary import LayerSummary, Summary, summary

__all__ = [
    "Health",
    "LayerSummary",
    "MemoryReport",
    "RoleHealth",
    "Summary",
    "as_it_was",
    "health",
    "memory",
    "peak_growth",
    "resident",
    "summary",
    "tune_malloc",
]
