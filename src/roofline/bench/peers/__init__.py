"""What ours is measured beside: transformers' models in the same process, OpenVINO behind a server of its own."""
