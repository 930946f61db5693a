"""Commands about models and their files."""
