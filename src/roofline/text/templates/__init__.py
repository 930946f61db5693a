"""Chat templates: messages to the text and ids a model was trained on, rendered in a sandbox."""
