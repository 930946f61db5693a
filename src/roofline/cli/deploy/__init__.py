"""Commands for many servers as one."""
