"""Answers held to a form: constraints compiled by llguidance, off the step loop, and a bit mask of ids for each row."""
