"""Parse, call, print: one short file a command."""
