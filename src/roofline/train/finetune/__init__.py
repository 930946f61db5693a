"""Fine-tuning: samples of any common form to rows with targets, and the run that is trained on them."""
