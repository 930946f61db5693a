"""Fleets: thousands of replicas behind a router, that are scaled, fail and are repaired, in slices of time."""
