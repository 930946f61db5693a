"""Programs and sampling the slow, obvious way."""
