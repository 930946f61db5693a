"""What an OpenAI-compatible server promises, checked from outside: `roofline conform URL`."""
