"""Many servers as one: replicas of `roofline serve` behind a load balancer that exists, and how many there are."""
