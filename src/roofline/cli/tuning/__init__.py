"""`roofline tune` and its subcommands."""
