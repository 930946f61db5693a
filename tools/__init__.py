"""Scripts for those who work on Roofline; nothing in the package imports them."""
