"""`roofline bench lora`: fine-tuning timed over batch sizes."""
