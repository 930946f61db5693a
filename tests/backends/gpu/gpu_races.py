"""What the interpreter cannot show by its results, because it runs a program's lanes in step: races between threads.

On a GPU what one thread has stored is seen by the others of its program behind a barrier alone, and Triton sets none of
its own for memory that is not shared. So no program may load what it has stored since the last barrier.
"""

import numpy as np


class Races:
    """Watches the loads, stores and barriers of every program that the interpreter runs.

    barriers: how many there were, in all programs since it was last set.
    """

    def __init__(self):
        self.barriers = 0
        self._stored = []  # (lowest, highest, all): addresses of each store of this program since the last barrier

    def watch(self, builder):
        """Patch an InterpreterBuilder; the call that is returned undoes it."""
        names = ("set_grid_idx", "create_barrier", "create_masked_load", "create_masked_store")
        originals = {name: getattr(builder, name) for name in names}

        def set_grid_idx(this, *index):
            self._stored = []
            return originals["set_grid_idx"](this, *index)

        def create_barrier(this):
            self.barriers += 1
            self._stored = []

        def create_masked_load(this, pointers, mask, *rest):
            if self._stored:
                self._check(pointers.data[mask.data.astype(bool)])
            return originals["create_masked_load"](this, pointers, mask, *rest)

        def create_masked_store(this, pointers, value, mask, *rest):
            addresses = pointers.data[mask.data.astype(bool)]
            if addresses.size:
                self._stored.append((addresses.min(), addresses.max(), addresses))
            return originals["create_masked_store"](this, pointers, value, mask, *rest)

        for watcher in (set_grid_idx, create_barrier, create_masked_load, create_masked_store):
            setattr(builder, watcher.__name__, watcher)

        def undo():
            for name, original in originals.items():
                setattr(builder, name, original)

        return undo

    def _check(self, addresses):
        for lowest, highest, stored in self._stored:
            if addresses.size and addresses.min() <= highest and addresses.max() >= lowest:
                assert not np.isin(addresses, stored).any(), "a race: no barrier stands between a store and this load"
