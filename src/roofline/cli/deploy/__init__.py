"""Commands about fleets: several servers behind one address."""
