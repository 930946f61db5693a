"""The load generator: sends traffic to a target at planned moments and writes down what happened, as raw events."""
