"""Files that other programs start servers from: a systemd unit, Dockerfiles, a compose file."""
