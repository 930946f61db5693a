"""Files of requests, each a line: read and checked, answered by the server's own routes, written as OpenAI does."""
