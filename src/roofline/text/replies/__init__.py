"""What models write: text, reasoning and calls of tools, told apart while it streams."""
