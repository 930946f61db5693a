"""Replica processes: started, watched, restarted and replaced, behind sockets that outlive each of them."""
