"""How much memory a process of a run will take, estimated before its first step."""
