"""HAProxy in front of replicas: its configuration, which is a function of a description, and its processes."""
