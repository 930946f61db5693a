"""The vocabulary: every op once, one declaration each."""
