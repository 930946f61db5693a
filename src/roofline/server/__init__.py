"""HTTP -> engine facade."""
