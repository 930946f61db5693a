"""Program -> Executable, a folder each."""
