"""Reports: measured points as one page, as Markdown, as CSV, and in a terminal while they are measured."""
