"""What ours is measured beside, in the same process: transformers' models under torch, one technique at a time."""
