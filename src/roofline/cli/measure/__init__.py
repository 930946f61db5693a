"""Commands that measure or describe this machine."""
