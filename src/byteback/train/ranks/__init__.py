# SPDX-License-Identifier: Apache-2.0
"""Several processes that train one network. docs/12-many-machines.md says what they promise.

`world.py` knows the processes and passes on what they tell each other, `setup.py` checks before training that they have the
same code, settings and data, and `step.py` is what the loop calls.
"""

from __future__ import annotations

from byteback.train.ranks.step import (
    Step,
    Wishes,
    agree_on_step,
    fail_together,
    random_states,
    replicate,
    seed_apart,
    set_random_state,
    share_norms,
    stoppable,
    test_batches,
)
from byteback.train.ranks.world import LostRank, World, join

__all__ = ["World", "LostRank", "join", "Step", "Wishes", "replicate", "agree_on_step", "share_norms", "fail_together"]
__all__ += ["test_batches", "stoppable", "random_states", "set_random_state", "seed_apart"]
