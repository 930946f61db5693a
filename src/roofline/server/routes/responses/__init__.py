"""OpenAI's Responses API: answers that are kept, and conversations that go on from them."""
