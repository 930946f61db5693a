"""trace -> Program, its passes and its text form."""
