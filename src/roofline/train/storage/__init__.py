"""Where a run's files lie: a folder of this machine or a bucket of an object store, behind one interface."""
