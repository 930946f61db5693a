"""How files of each model family are read: a module each, named in table.py."""
