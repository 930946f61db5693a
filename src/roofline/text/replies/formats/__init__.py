"""One file for each format in which models write calls of tools; `table.py` has them in the order in which a chat
template is asked."""
