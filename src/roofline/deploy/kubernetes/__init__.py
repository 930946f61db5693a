"""Kubernetes' objects of a fleet: what `kubectl apply` takes, made from the options of a server and of its scaling."""
