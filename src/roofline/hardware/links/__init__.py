"""How the devices of a host are linked."""
