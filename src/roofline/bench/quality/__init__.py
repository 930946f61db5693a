"""How well a model predicts a text, and how far one model's predictions are from another's."""
