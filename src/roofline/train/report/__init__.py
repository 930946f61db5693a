"""What a run writes about itself: its log, other loggers, its card and its page."""
