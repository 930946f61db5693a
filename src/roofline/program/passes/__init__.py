"""Pure functions Program -> Program, one short file each."""
